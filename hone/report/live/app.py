"""The live page's server: pages and JSON about run folders, for GET requests only, except those of time travel.

    app = make_app(Library.at(Path("runs")), hosts=("127.0.0.1", "localhost"), token=None)

Every response is built from files, so a finished or crashed run is shown like a running one. Text from a run is
untrusted: invisible characters are made visible here, the page inserts it as text only, and the content security policy
forbids everything that does not come from this server. If a token is set, the first request carries it in its address;
a cookie then carries it. Time travel starts work: a POST, which exists only if `travel` is given, and must name this
page as its origin.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hone.base.guard import refusal
from hone.base.settings import UserError
from hone.base.visible import visible
from hone.report import style
from hone.report.live import evaluations, settings, views
from hone.report.live.library import ROW_FILES, Library, StageFolder
from hone.report.live.query import Query, whole
from hone.report.live.tail import read_from
from hone.report.live.travel import Travel

STATIC = Path(__file__).parent / "static"
COOKIE = "hone_view"
#: Rows of a table in one answer.
MOST_ROWS = 500
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def make_app(library: Library, hosts: Sequence[str], token: str | None, travel: Travel | None = None) -> Starlette:
    """The page's application. `hosts`: names that requests may address; empty: any. `token`: required of requests, if
    not None. `travel`: what POST requests start; None: there are none."""
    pages = Pages(library, travel)
    stage = "/api/run/{run}/{stage}"
    gets: dict[str, Callable[[Request], Response]] = {
        "/": _index,
        "/static/colours.css": _colours,
        "/static/{name}": _static,
        "/api/runs": pages.runs,
        "/api/run/{run}": pages.run,
        "/api/compare": pages.compare,
        f"{stage}/rows/{{file}}": pages.rows,
        f"{stage}/rollouts": pages.rollouts,
        f"{stage}/choices": pages.choices,
        f"{stage}/points": pages.points,
        f"{stage}/distributions": pages.distributions,
        f"{stage}/group/{{step:int}}/{{group:int}}": pages.group,
        f"{stage}/sample/{{step:int}}/{{place:int}}": pages.sample,
        f"{stage}/text/{{step:int}}/{{place:int}}": pages.text,
        f"{stage}/settings": pages.settings,
        f"{stage}/evaluations": pages.evaluations,
        f"{stage}/flips": pages.flips,
        f"{stage}/answers": pages.answers,
        f"{stage}/travel": pages.travel,
    }
    posts = {} if travel is None else {f"{stage}/rescore": pages.rescore, f"{stage}/replay": pages.replay}
    return Starlette(
        routes=[
            *(Route(path, page, methods=["GET"]) for path, page in gets.items()),
            *(Route(path, page, methods=["POST"]) for path, page in posts.items()),
        ],
        middleware=[Middleware(Door, hosts=hosts, token=token, posts=bool(posts))],
        exception_handlers={UserError: _wrong, HTTPException: _http_error},
    )


class Pages:
    """One method for each address of the API."""

    def __init__(self, library: Library, travel: Travel | None) -> None:
        self.library, self._travel = library, travel

    def _stage(self, request: Request) -> StageFolder:
        return self.library.stage(request.path_params["run"], request.path_params["stage"])

    def runs(self, request: Request) -> Response:
        body = {"folder": str(self.library.root), "only": self.library.single, "runs": self.library.summaries()}
        return answer(request, body)

    def run(self, request: Request) -> Response:
        return answer(request, self.library.summary(request.path_params["run"]))

    def rows(self, request: Request) -> Response:
        """Rows of a file from a byte offset on: see `hone.report.live.tail`."""
        name = request.path_params["file"]
        if name not in ROW_FILES:
            raise UserError(f"no rows {name}; there are {', '.join(ROW_FILES)}")
        query = request.query_params
        stage = self._stage(request)
        piece = read_from(stage.folder, f"{name}.jsonl", whole(query, "from") or 0, whole(query, "mark") or 0)
        return answer(request, vars(piece))

    def rollouts(self, request: Request) -> Response:
        stage, query = self._stage(request), request.query_params
        start, count = whole(query, "start") or 0, min(whole(query, "count") or 100, MOST_ROWS)
        body = views.listing(stage.browser, Query.of(query), start, count)
        return answer(request, {**body, "trouble": stage.trouble})

    def choices(self, request: Request) -> Response:
        return answer(request, views.choices(self._stage(request).browser.index, Query.of(request.query_params)))

    def points(self, request: Request) -> Response:
        return answer(request, views.points(self._stage(request).browser, Query.of(request.query_params)))

    def distributions(self, request: Request) -> Response:
        return answer(request, views.distributions(self._stage(request).browser.index))

    def group(self, request: Request) -> Response:
        stage, where = self._stage(request), request.path_params
        return answer(request, views.group_of(stage.browser.index, where["step"], where["group"], stage.weights))

    def sample(self, request: Request) -> Response:
        stage, where = self._stage(request), request.path_params
        return answer(request, views.sample_of(stage.browser.index, where["step"], where["place"], stage.weights))

    def text(self, request: Request) -> Response:
        """The exact text, as a file to save: browsers do not show it as a page."""
        where = request.path_params
        text = views.raw_text(self._stage(request).browser.index, where["step"], where["place"])
        name = f"step_{where['step']}_sample_{where['place']}.txt"
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(text.encode("utf-8", "replace"), media_type="text/plain; charset=utf-8", headers=headers)

    def settings(self, request: Request) -> Response:
        return answer(request, settings.of_stage(self._stage(request)))

    def travel(self, request: Request) -> Response:
        """Whether time travel is on, the rewards that can be tried, and the steps whose checkpoint was kept."""
        rewards = [] if self._travel is None else self._travel.rewards
        checkpoints = self._stage(request).checkpoints
        return answer(request, {"allowed": self._travel is not None, "rewards": rewards, "checkpoints": checkpoints})

    def rescore(self, request: Request) -> Response:
        assert self._travel is not None  # else there is no such address
        reward = request.query_params.get("reward", "")
        return answer(request, self._travel.rescore(self._stage(request), _step(request), reward))

    def replay(self, request: Request) -> Response:
        assert self._travel is not None
        return answer(request, self._travel.replay(self._stage(request), _step(request)))

    def compare(self, request: Request) -> Response:
        stages = []
        for side in ("a", "b"):
            run, _, stage = request.query_params.get(side, "").rpartition("/")
            stages.append(self.library.stage(run, stage))
        return answer(request, settings.differences(*stages))

    def evaluations(self, request: Request) -> Response:
        return answer(request, {"rows": evaluations.evaluations(self._stage(request))})

    def flips(self, request: Request) -> Response:
        query = request.query_params
        return answer(request, evaluations.flips(self._stage(request), query.get("a", ""), query.get("b", "")))

    def answers(self, request: Request) -> Response:
        a, b, problem = (request.query_params.get(name, "") for name in ("a", "b", "problem"))
        return answer(request, evaluations.answers(self._stage(request), a, b, problem))


def _step(request: Request) -> int:
    step = whole(request.query_params, "step")
    if step is None:
        raise UserError("step is missing: say which")
    return step


# --- answers ------------------------------------------------------------------------------------------------------


def answer(request: Request, body: Any) -> Response:
    """A JSON response with visible text and finite numbers, or 304 if the browser has it already."""
    data = json.dumps(shown(body), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    tag = f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return Response(data, media_type="application/json", headers={"ETag": tag})


def shown(value: Any) -> Any:
    """The value with invisible characters made visible, and null for numbers that JSON lacks."""
    if isinstance(value, float):  # first: most values of a long answer are numbers
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, (list, tuple)):
        return [shown(inner) for inner in value]
    if isinstance(value, Mapping):
        return {visible(key): shown(inner) for key, inner in value.items()}
    return value


def _index(request: Request) -> Response:
    return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8")


def _colours(request: Request) -> Response:
    """The colours of the report, which the live page shares."""
    return Response(style.COLOURS, media_type="text/css; charset=utf-8")


def _static(request: Request) -> Response:
    """Serves only files directly in the folder, so that no name can lead elsewhere."""
    path = next((path for path in STATIC.iterdir() if path.name == request.path_params["name"]), None)
    if path is None or path.suffix not in KINDS:
        raise HTTPException(404, "there is no such file")
    return FileResponse(path, media_type=f"{KINDS[path.suffix]}; charset=utf-8")


def _wrong(request: Request, error: Exception) -> Response:
    return _refused(404, str(error))


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # it is registered for this class
    return _refused(error.status_code, error.detail)


def _refused(status: int, message: str) -> Response:
    return Response(json.dumps({"error": visible(message)}), status, media_type="application/json")


# --- who may ask --------------------------------------------------------------------------------------------------


class Door:
    """Refuses what is not a GET from this server's own page, or lacks the token; adds the security headers.

    `posts`: a POST may pass if it names this server's page as its origin, as every browser does.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str], token: str | None, posts: bool) -> None:
        self.app, self.hosts, self.token, self.posts = app, hosts, token, posts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((name.lower().encode(), value.encode()) for name, value in HEADERS.items()),
                ]
            await send(message)

        request = Request(scope)
        await (self._response(request) or self.app)(scope, receive, guarded)

    def _response(self, request: Request) -> Response | None:
        """None: the request may pass."""
        if request.method == "POST" and self.posts:
            if "origin" not in request.headers:
                return _refused(403, "a POST must come from this server's own page")
        elif request.method not in ("GET", "HEAD"):
            return _refused(405, "this server only answers GET")
        # A link in a mail or a document may open the page itself, which contains no data of a run.
        if request.url.path != "/" or "origin" in request.headers:
            if error := refusal(request.headers, self.hosts):
                return _refused(error.status, str(error))
        elif error := refusal({"host": request.headers.get("host", "")}, self.hosts):
            return _refused(error.status, str(error))
        return self._unknown(request) if self.token is not None else None

    def _unknown(self, request: Request) -> Response | None:
        assert self.token is not None  # else there is nothing to know
        token_given = request.query_params.get("token")
        if token_given is not None and request.url.path == "/" and same(token_given, self.token):
            response = RedirectResponse("/", 303)
            response.set_cookie(COOKIE, self.token, httponly=True, samesite="strict", path="/")
            return response
        if same(request.cookies.get(COOKIE, ""), self.token):
            return None
        return _refused(401, "open the address that `hone view` printed: it contains the token")


def same(value: str, token: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(value.encode(), token.encode())

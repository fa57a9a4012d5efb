"""Unpack wheels that this Python lacks: python3 benchmarks/gpu_install.py build/gpu-wheels build/gpu-packages

Without pip, which a machine may not have and which would ask a network. A package that is installed already, in
whatever version, is left as it is; of pydantic, whose two halves must fit, both come or neither.
"""

from __future__ import annotations

import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Packages that must fit each other: none is taken unless all are missing, or one of them is.
TOGETHER = {"pydantic_core": "pydantic"}


def main() -> None:
    wheels, target = Path(sys.argv[1]), Path(sys.argv[2])
    if not any(wheels.glob("*.whl")):
        print(f"{wheels} holds no wheels: run `make gpu-wheels` where there is a network; going on without", flush=True)
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.split("-")[0]
        if there(TOGETHER.get(name, name)):
            continue
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
        print(f"unpacked {wheel.name}", flush=True)


def there(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()

// Attention of one new token per row over a shared prompt and the row's own tokens, in float32.
//
// A row may see its prompt and its own tokens from some position on only (a sliding window), scores may be capped, and
// a sink may take part in the softmax. Values may have a size of their own.
//
// One thread streams the keys and values of a row once; memory bandwidth bounds it. Vectors are those of GCC and
// Clang (16 lanes, split where registers are narrower), so the same source serves AVX-512, AVX2 and NEON.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
constexpr int LANES = 16;
constexpr long AHEAD = 2048;  // prefetch distance in floats: 8 KiB was fastest

inline vec load(const float *p) { return *reinterpret_cast<const vec *>(p); }
inline void store(float *p, vec v) { *reinterpret_cast<vec *>(p) = v; }
inline float sum(vec v) {
  float s = 0;
  for (int i = 0; i < LANES; i++) s += v[i];
  return s;
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t index __attribute__((vector_size(64)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, index{__VA_ARGS__})
#endif

// The sums of four vectors at once: an eighth of the additions of four separate sums.
inline void sum4(vec a, vec b, vec c, vec d, float *out) {
  const vec ab = SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                 SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  const vec cd = SHUFFLE(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                 SHUFFLE(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  vec all = SHUFFLE(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
            SHUFFLE(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  all += SHUFFLE(all, all, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  all += SHUFFLE(all, all, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  for (int k = 0; k < 4; k++) out[k] = all[4 * k];
}

// exp(x) for x <= 0, to a few units in the last place: 2^n * e^t with |t| <= ln(2) / 2.
inline float exp_nonpositive(float x) {
  x = std::max(x, -87.0f);
  const int32_t n = static_cast<int32_t>(x * 1.44269504f - 0.5f);
  const float t = x - static_cast<float>(n) * 0.693147181f;
  float y = 1.0f / 720.0f;
  y = y * t + 1.0f / 120.0f;
  y = y * t + 1.0f / 24.0f;
  y = y * t + 1.0f / 6.0f;
  y = y * t + 0.5f;
  y = y * t + 1.0f;
  y = y * t + 1.0f;
  const int32_t bits = (n + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return y * power;
}

template <int R, int D, int K>
inline void tile_scores(const vec (&q)[R][D / LANES], const float *keys, float *scores, long stride) {
  vec acc[R][K];
  for (int i = 0; i < D / LANES; i++)
    for (int k = 0; k < K; k++) {
      const vec key = load(keys + k * D + i * LANES);
      for (int r = 0; r < R; r++) acc[r][k] = i ? acc[r][k] + q[r][i] * key : q[r][i] * key;
    }
  for (int r = 0; r < R; r++)
    if constexpr (K == 4)
      sum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3], scores + r * stride);
    else
      for (int k = 0; k < K; k++) scores[r * stride + k] = sum(acc[r][k]);
}

// query [R, D] x keys [count, D] -> the first `count` columns of scores [R, stride].
template <int R, int D, bool COLD>
void scores_of(const float *query, const float *keys, long count, float *scores, long stride) {
  vec q[R][D / LANES];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < D / LANES; i++) q[r][i] = load(query + r * D + i * LANES);
  long j = 0;
  for (; j + 4 <= count; j += 4) {
    if constexpr (COLD)
      for (int i = 0; i < 4 * D; i += LANES) __builtin_prefetch(keys + j * D + AHEAD + i);
    tile_scores<R, D, 4>(q, keys + j * D, scores + j, stride);
  }
  for (; j < count; j++) tile_scores<R, D, 1>(q, keys + j * D, scores + j, stride);
}

// out [R, D] += weights [R, stride] x values [count, D]
template <int R, int D, bool COLD>
void add_values(const float *weights, long stride, const float *values, long count, float *out) {
  vec acc[R][D / LANES];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < D / LANES; i++) acc[r][i] = load(out + r * D + i * LANES);
  for (long j = 0; j < count; j++)
    for (int i = 0; i < D / LANES; i++) {
      if constexpr (COLD) __builtin_prefetch(values + j * D + i * LANES + AHEAD);
      const vec value = load(values + j * D + i * LANES);
      for (int r = 0; r < R; r++) acc[r][i] += weights[r * stride + j] * value;
    }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < D / LANES; i++) store(out + r * D + i * LANES, acc[r][i]);
}

// By lanes: a compiler that respects NaN does not reorder `max`.
inline float largest(const float *s, long count) {
  float top = s[0];
  long j = 0;
  if (count >= LANES) {
    vec tops = load(s);
    for (; j + LANES <= count; j += LANES) {
      const vec other = load(s + j);
      tops = other > tops ? other : tops;
    }
    for (int i = 0; i < LANES; i++) top = std::max(top, tops[i]);
  }
  for (; j < count; j++) top = std::max(top, s[j]);
  return top;
}

struct Part {
  const float *keys, *values;  // [count, D]
  long count;
};

struct Shape {
  long size, value_size;  // of a key, of a value
  float scaling, softcap;  // softcap 0: none
};

// Sums for so many queries fit the registers.
constexpr long registers = 24 * LANES, largest_size = 512;
constexpr bool compiled_for(long queries, long size) { return queries == 1 || queries * size <= registers; }

#define HEAD_SIZES(CASE) \
  CASE(16) CASE(32) CASE(48) CASE(64) CASE(80) CASE(96) CASE(112) CASE(128) CASE(192) CASE(256) CASE(512)

// `S` is the head size where keys and values have the same; 0 where they differ, as in multi-head latent attention.
template <int R, int S, bool COLD>
inline void scores_of_size(long size, const float *query, const float *keys, long count, float *scores, long stride) {
  if constexpr (S) return scores_of<R, S, COLD>(query, keys, count, scores, stride);
  switch (size) {
#define CASE(D) \
  case D: if constexpr (compiled_for(R, D)) scores_of<R, D, COLD>(query, keys, count, scores, stride); break;
    HEAD_SIZES(CASE)
#undef CASE
  }
}

template <int R, int S, bool COLD>
inline void add_values_of_size(long size, const float *weights, long stride, const float *values, long count,
                               float *out) {
  if constexpr (S) return add_values<R, S, COLD>(weights, stride, values, count, out);
  switch (size) {
#define CASE(D) \
  case D: if constexpr (compiled_for(R, D)) add_values<R, D, COLD>(weights, stride, values, count, out); break;
    HEAD_SIZES(CASE)
#undef CASE
  }
}

// c * tanh(s / c), with tanh(x) = (1 - e) / (1 + e) and e = exp(-2 |x|).
inline void cap(float *s, long count, float c) {
  for (long j = 0; j < count; j++) {
    const float e = exp_nonpositive(-2.0f * std::fabs(s[j]) / c);
    s[j] = std::copysign(c * (1.0f - e) / (1.0f + e), s[j]);
  }
}

// One softmax over both parts, for R queries that share their keys. `sinks` [R], or null.
template <int R, int S>
void attend_some(const Shape &shape, const float *query, const Part *parts, const float *sinks, float *out,
                 float *work) {
  const long size = S ? S : shape.size, value_size = S ? S : shape.value_size;
  float scaled[S ? R * S : R == 1 ? largest_size : registers];
  for (long i = 0; i < R * size; i++) scaled[i] = query[i] * shape.scaling;
  const long first = parts[0].count, total = first + parts[1].count;
  scores_of_size<R, S, false>(size, scaled, parts[0].keys, first, work, total);
  scores_of_size<R, S, true>(size, scaled, parts[1].keys, parts[1].count, work + first, total);
  if (shape.softcap > 0) cap(work, R * total, shape.softcap);
  float inverse[R];
  for (int r = 0; r < R; r++) {
    float *s = work + r * total, top = largest(s, total), mass = 0;
    if (sinks) {
      top = std::max(top, sinks[r]);
      mass = exp_nonpositive(sinks[r] - top);
    }
    for (long j = 0; j < total; j++) mass += s[j] = exp_nonpositive(s[j] - top);
    inverse[r] = 1.0f / mass;
  }
  std::fill(out, out + R * value_size, 0.0f);
  add_values_of_size<R, S, false>(value_size, work, total, parts[0].values, first, out);
  add_values_of_size<R, S, true>(value_size, work + first, total, parts[1].values, parts[1].count, out);
  for (int r = 0; r < R; r++)
    for (long d = 0; d < value_size; d++) out[r * value_size + d] *= inverse[r];
}

// As many queries at once as registers can hold sums for.
template <int S>
void attend(const Shape &shape, long repeat, const float *query, const Part *parts, const float *sinks, float *out,
            float *work) {
  const long size = S ? S : shape.size, value_size = S ? S : shape.value_size;
  const long most = std::min(4L, std::max(1L, registers / std::max(size, value_size)));
  while (repeat > 0) {
    const long n = std::min(repeat, most);
    if (n == 1) attend_some<1, S>(shape, query, parts, sinks, out, work);
    if constexpr (compiled_for(2, S))
      if (n == 2) attend_some<2, S>(shape, query, parts, sinks, out, work);
    if constexpr (compiled_for(3, S))
      if (n == 3) attend_some<3, S>(shape, query, parts, sinks, out, work);
    if constexpr (compiled_for(4, S))
      if (n == 4) attend_some<4, S>(shape, query, parts, sinks, out, work);
    query += n * size, out += n * value_size, repeat -= n;
    if (sinks) sinks += n;
  }
}

// Null for sizes that are not compiled.
decltype(&attend<0>) attend_for(long size, long value_size) {
  decltype(&attend<0>) same = nullptr, mixed = nullptr;
  switch (size) {
#define CASE(D) case D: same = attend<D>; break;
    HEAD_SIZES(CASE)
#undef CASE
  }
  switch (value_size) {
#define CASE(D) case D: mixed = attend<0>; break;
    HEAD_SIZES(CASE)
#undef CASE
  }
  return size == value_size ? same : same ? mixed : nullptr;
}

}  // namespace

// query [B, H, D], out [B, H, Dv]; prompt keys and values [Hkv, P, prompt_capacity, D or Dv]; suffix keys and values
// [Hkv, B, capacity, D or Dv]; prompts, firsts, lengths, starts [B]: the prompt of each row, the first position in it
// that the row sees, that prompt's length and the first column that the row sees; sinks [H] or null; `softcap` 0: none;
// `end`: one past the last column; `work` [4 * (prompt_capacity + end)]. Rows first..last - 1 only.
// Returns 0, or 1 for a head size that it was not compiled for.
extern "C" int hone_decode_attention(
    const float *query, const float *prompt_keys, const float *prompt_values, const float *suffix_keys,
    const float *suffix_values, const int64_t *prompts, const int64_t *firsts, const int64_t *lengths,
    const int64_t *starts, const float *sinks, float *out, float *work, int64_t first, int64_t last, int64_t rows,
    int64_t num_prompts, int64_t kv_heads, int64_t repeat, int64_t size, int64_t value_size, int64_t prompt_capacity,
    int64_t capacity, int64_t end, float scaling, float softcap) {
  const auto call = attend_for(static_cast<long>(size), static_cast<long>(value_size));
  if (!call) return 1;
  const Shape shape = {static_cast<long>(size), static_cast<long>(value_size), scaling, softcap};
  for (int64_t h = 0; h < kv_heads; h++)
    for (int64_t b = first; b < last; b++) {
      const int64_t p = (h * num_prompts + prompts[b]) * prompt_capacity + firsts[b];
      const int64_t s = (h * rows + b) * capacity + starts[b];
      const Part parts[2] = {
          {prompt_keys + p * size, prompt_values + p * value_size, static_cast<long>(lengths[b] - firsts[b])},
          {suffix_keys + s * size, suffix_values + s * value_size, static_cast<long>(end - starts[b])}};
      const int64_t head = h * repeat, at = b * kv_heads * repeat + head;
      call(shape, static_cast<long>(repeat), query + at * size, parts, sinks ? sinks + head : nullptr,
           out + at * value_size, work);
    }
  return 0;
}

// Activations by name, on fp32, as accurate as the problem's Element shows. NaN stays NaN. CONTRIBUTING.md lists what a new one takes.
#pragma once

namespace cutlass_sep {

/// 2^x to 2 units in the last place; 0 where that is below 2^-126.
CUTLASS_DEVICE float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1/x to 1 unit in the last place; 0 where that is below 2^-126.
CUTLASS_DEVICE float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The larger of both; NaN if either is.
CUTLASS_DEVICE float maximum(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

/// c[0] + c[1] x + c[2] x^2 + ... of N values, step by step for all of them, so that they hide each other's latencies.
template <int Terms, int N>
CUTLASS_DEVICE void polynomials(float const (&c)[Terms], float const (&x)[N], float (&y)[N]) {
  CUTLASS_PRAGMA_UNROLL
  for (int k = 0; k < N; ++k) y[k] = c[Terms - 1];
  CUTLASS_PRAGMA_UNROLL
  for (int i = Terms - 2; i >= 0; --i)
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < N; ++k) y[k] = fmaf(y[k], x[k], c[i]);
}

/// x / (1 + 2^v), given v - 16: both parts of the quotient are 2^-16 of that, which reaches bfloat16's smallest numbers.
CUTLASS_DEVICE float quotient16(float x, float v_less_16) {
  return x * 0x1p-16f * reciprocal_approximate(0x1p-16f + exp2_approximate(v_less_16));
}

template <class Element>
struct Identity {
  CUTLASS_DEVICE static float apply(float x) { return x; }
};

template <class Element>
struct Relu {
  CUTLASS_DEVICE static float apply(float x) { return x < 0.f ? 0.f : x; }
};

template <class Element>
struct Relu6 {
  CUTLASS_DEVICE static float apply(float x) { return x < 0.f ? 0.f : (x > 6.f ? 6.f : x); }
};

template <class Element>
struct Silu {
  CUTLASS_DEVICE static float apply(float x) {
    if constexpr (sizeof(Element) == 4) return x / (1.f + expf(-x));
    return quotient16(x, fmaf(x, -1.44269504f, -16.f));  // v = -x log2(e)
  }
};

template <class Element>
struct Hardswish {
  CUTLASS_DEVICE static float apply(float x) { return x * (Relu6<Element>::apply(x + 3.f) * (1.f / 6.f)); }
};

// gelu(x) = x Phi(x) = max(x, 0) - a Phi(-a) with a = |x|: no cancellation, and -0 stays -0 where max yields it. At -Inf it is
// Inf * 0, NaN as in PyTorch; +Inf is cut off before it becomes a.

/// Where y is rounded to 16 bits: c is the polynomial log2(Phi(-a)) + 16 of -a / 2^16. Both powers are there for bfloat16, whose
/// smallest numbers are below those that exp2_approximate yields. In place; step by step for all values, so that they hide each other's
/// latencies. `kFinite`: +Inf may become NaN.
template <bool kFinite, int Terms, int N>
CUTLASS_DEVICE void gelu16(float const (&c)[Terms], float (&x)[N]) {
  float minus_a[N], y[N];
  CUTLASS_PRAGMA_UNROLL
  for (int k = 0; k < N; ++k) minus_a[k] = fabsf(kFinite ? x[k] : fminf(x[k], 100.f)) * -0x1p-16f;
  polynomials(c, minus_a, y);
  CUTLASS_PRAGMA_UNROLL
  for (int k = 0; k < N; ++k) y[k] = exp2_approximate(y[k]);
  CUTLASS_PRAGMA_UNROLL
  for (int k = 0; k < N; ++k) x[k] = fmaf(minus_a[k], y[k], maximum(x[k], -0.f));
}

template <class Element>
struct Gelu;

template <class Activation>
CUTLASS_DEVICE float apply_one(float x) {
  float value[1] = {x};
  Activation::template apply_several<false>(value);
  return value[0];
}

template <>
struct Gelu<cutlass::half_t> {
  CUTLASS_DEVICE static float apply(float x) { return apply_one<Gelu>(x); }
  template <bool kFinite, int N>
  CUTLASS_DEVICE static void apply_several(float (&x)[N]) {
    constexpr float c[] = {15.f,
                           1.1502334582953988f * 0x1p16f,
                           -0.46211006717058944f * 0x1p32f,
                           0.04962976100722836f * 0x1p48f,
                           0.006221208093796538f * 0x1p64f,
                           0.0003593283796137976f * 0x1p80f};
    gelu16<kFinite>(c, x);
  }
};

template <>
struct Gelu<cutlass::bfloat16_t> {
  CUTLASS_DEVICE static float apply(float x) { return apply_one<Gelu>(x); }
  template <bool kFinite, int N>
  CUTLASS_DEVICE static void apply_several(float (&x)[N]) {
    constexpr float c[] = {15.f,
                           1.1482941930861945f * 0x1p16f,
                           -0.4657264878943117f * 0x1p32f,
                           0.04803231988929473f * 0x1p48f,
                           0.0062999999594453675f * 0x1p64f,
                           0.0005174367969749231f * 0x1p80f,
                           2.3501465612198317e-05f * 0x1p96f,
                           4.4672047699595616e-07f * 0x1p112f};
    gelu16<kFinite>(c, x);
  }
};

/// Phi(-a) = 2^(n - 1) exp(-k f) where f = a^2 + n/0.64 + 0.945/0.64 a + a rest(a - 2.5) and k = 0.64 ln 2. So n/0.64 has few bits,
/// and k a rest stays below 0.06 up to a = 5: its roundings count for little. Beyond a = 6.5, where y > -3e-10, rest is constant.
template <>
struct Gelu<float> {
  CUTLASS_DEVICE static float apply(float x) { return apply_one<Gelu>(x); }
  template <bool kFinite, int N>
  CUTLASS_DEVICE static void apply_several(float (&x)[N]) {
    constexpr float rest[] = {-0.01951952837407589f,    -0.037592269480228424f, 0.025766057893633842f,  -0.003862477373331785f,
                              0.000521389243658632f,    -5.793144373456016e-05f, 3.943373030779185e-06f, 3.4657952596717223e-07f,
                              -2.2670413102332532e-07f, 5.130243607709417e-08f,  -4.75880357342362e-09f};
    // exp(-k f) - 1: +0 where f is 0, so that -0 stays -0
    constexpr float power[] = {0.f, -0.4436142146587372f, 0.09839674830436707f, -0.01454976387321949f,
                               0.0016137585043907166f, -0.00014404923422262073f, 1.0526141522859689e-05f};
    constexpr float kRound = 0x1.8p23f + 126.f;  // a float near it ends in the bits of 126 + n, the exponent field of 2^(n - 1)

    float a[N], f[N], lost[N], half[N], centred[N], p[N];
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < N; ++k) {
      float const b = fabsf(kFinite ? x[k] : fminf(x[k], 100.f));
      a[k] = fminf(b, 13.31f);  // n is -126 there: 2^(n - 1) becomes 0
      float const rounded = fmaf(a[k], fmaf(a[k], -0.64f, -0.945f), kRound);
      float const n = rounded - kRound;
      half[k] = -b * __int_as_float(__float_as_int(rounded) << 23);
      f[k] = fmaf(n, 1.5625f, a[k] * a[k]);
      lost[k] = fmaf(a[k], a[k], fmaf(n, 1.5625f, -f[k]));  // in both roundings
      f[k] = fmaf(a[k], 1.4765625f, f[k]);
            centred[k] = fminf(a[k], 6.5f) - 2.5f;
    }
    polynomials(rest, centred, p);
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < N; ++k) f[k] += fmaf(a[k], p[k], lost[k]);
    polynomials(power, f, p);
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < N; ++k) x[k] = fmaf(half[k], p[k], maximum(x[k], -0.f) + half[k]);
  }
};

template <class Element>
struct GeluTanh {
  CUTLASS_DEVICE static float apply(float x) {
    if constexpr (sizeof(Element) == 4) return 0.5f * x * (1.f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    // (1 + tanh u) / 2 = 1 / (1 + 2^v), v = -2 u log2(e)
    return quotient16(x, fmaf(x, fmaf(x * x, -0.10294324f, -2.30220819f), -16.f));
  }
};

template <class Activation, int N>
CUTLASS_DEVICE auto activate_several(float (&x)[N], int) -> decltype(Activation::template apply_several<true>(x)) {
  Activation::template apply_several<true>(x);
}
template <class Activation, int N>
CUTLASS_DEVICE void activate_several(float (&x)[N], long) {
  CUTLASS_PRAGMA_UNROLL
  for (int k = 0; k < N; ++k) x[k] = Activation::apply(x[k]);
}

/// An activation on several values, in place: together if it is written so, else one by one. An infinite value may become NaN.
template <class Activation, int N>
CUTLASS_DEVICE void activate(float (&x)[N]) {
  activate_several<Activation>(x, 0);
}

}  // namespace cutlass_sep

// Conversions between the elements of memory, fp32 arithmetic and MMA operands.
#pragma once

namespace cutlass_sep {

/// N consecutive elements, as one access.
template <class Element, int N>
CUTLASS_DEVICE void load_vector(float (&value)[N], void const* address) {
  using Vector = cutlass::AlignedArray<Element, N>;
  Vector const raw = *reinterpret_cast<Vector const*>(address);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < N; ++i) value[i] = static_cast<float>(raw[i]);
}

template <class Element, int N>
CUTLASS_DEVICE cutlass::AlignedArray<Element, N> convert_vector(float const (&value)[N]) {
  cutlass::Array<float, N> source;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < N; ++i) source[i] = value[i];
  cutlass::Array<Element, N> const converted = cutlass::NumericArrayConverter<Element, float, N>{}(source);
  cutlass::AlignedArray<Element, N> result;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < N; ++i) result[i] = converted[i];
  return result;
}

template <class Element>
CUTLASS_DEVICE uint32_t pack_pair(float low, float high) {
  cutlass::Array<float, 2> source;
  source[0] = low, source[1] = high;
  alignas(4) cutlass::Array<Element, 2> const packed = cutlass::NumericArrayConverter<Element, float, 2>{}(source);
  return reinterpret_cast<uint32_t const&>(packed);
}

/// What rounding to fp16 leaves of two values, in fp16.
CUTLASS_DEVICE uint32_t low_half_pair(float low, float high) {
  __half2 const rounded = __floats2half2_rn(low, high);
  return pack_pair<cutlass::half_t>(low - __low2float(rounded), high - __high2float(rounded));
}

/// Two fp16 values, NaN in place of Inf.
CUTLASS_DEVICE uint32_t half_or_nan(uint32_t pair) {
  uint32_t r;
  asm("fma.rn.f16x2 %0, %1, %2, %1;" : "=r"(r) : "r"(pair), "r"(0));
  return r;
}

/// `sum` + 0 * `pair`, two 16-bit values each: NaN where the pair is not finite.
template <class Element>
CUTLASS_DEVICE uint32_t add_vanished(uint32_t pair, uint32_t sum) {
  uint32_t r;
  if constexpr (cute::is_same_v<Element, cutlass::half_t>) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(pair), "r"(0), "r"(sum));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(pair), "r"(0), "r"(sum));
  }
  return r;
}

/// x rounded to TF32 (nearest, ties away from zero), as an MMA operand takes it.
CUTLASS_DEVICE uint32_t tf32_operand(float x) {
  // CUTLASS's converter is a volatile asm: ptxas leaves it between the wgmma of a batch, which it then serialises (C7513).
  uint32_t r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}

/// The largest of a warp's values, in all lanes; one that is NaN does not count.
CUTLASS_DEVICE float warp_max(float x) {
  CUTLASS_PRAGMA_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

/// 2^-floor(log2 x) of a positive, normal x below 2^127: the inverse of a power of two.
CUTLASS_DEVICE float inverse_power(float x) { return __uint_as_float((254u << 23) - (__float_as_uint(x) & 0x7f800000u)); }

/// What to multiply values by that are to become fp16, none larger than `bound`: the power of two that takes it to [2^14, 2^15), at most 2^126,
/// by which fp16 holds whatever fp32 does. NaN from 2^79 on, as for a bound that is not finite: then 2^64, the largest inverse, leaves sums of
/// products in fp32's range.
CUTLASS_DEVICE float half_scale(float bound) {
  return bound < 0x1p79f ? inverse_power(fmaxf(bound, 0x1p-112f)) * 0x1p14f : __int_as_float(0x7fffffff);
}

/// What the expand warpgroup needs to know of a hidden channel.
struct HiddenChannel {
  float inverse_scale;  // of its row of the expand weights; then of its row of positions, for the depthwise warpgroup
  float norm;           // sum of the row's magnitudes
  float bias;
};

}  // namespace cutlass_sep

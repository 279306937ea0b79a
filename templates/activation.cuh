// Activations by name, on fp32. NaN stays NaN. A new one is a struct here and a name in cutlass_sep/problem.py.
#pragma once

namespace cutlass_sep {

struct Identity {
  CUTLASS_DEVICE static float apply(float x) { return x; }
};

struct Relu {
  CUTLASS_DEVICE static float apply(float x) { return x < 0.f ? 0.f : x; }
};

struct Relu6 {
  CUTLASS_DEVICE static float apply(float x) { return x < 0.f ? 0.f : (x > 6.f ? 6.f : x); }
};

struct Silu {
  CUTLASS_DEVICE static float apply(float x) { return x / (1.f + expf(-x)); }
};

struct Hardswish {
  CUTLASS_DEVICE static float apply(float x) { return x * Relu6::apply(x + 3.f) * (1.f / 6.f); }
};

struct Gelu {  // exact: x/2 * erfc(-x/sqrt 2), which keeps the relative accuracy of the left tail
  CUTLASS_DEVICE static float apply(float x) { return 0.5f * x * erfcf(-0.70710678118654752f * x); }
};

struct GeluTanh {
  CUTLASS_DEVICE static float apply(float x) {
    return 0.5f * x * (1.f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  }
};

}  // namespace cutlass_sep

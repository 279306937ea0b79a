// A 1-D depthwise convolution by FMA on rows of fp32 positions in shared memory, whose results replace the rows as MMA operands of two fp16 parts.
#pragma once

namespace cutlass_sep {

/// A window of fp32 positions of each of 64 channels, in 16-byte units: of the first 64 positions two blocks of [channel][8 units], XOR-swizzled by
/// channel % 8; behind them [unit][channel]. The blocks become the high and the low part of [channel][64 positions] fp16, swizzled alike.
template <class Config>
struct Fp32Rows {
  static constexpr int kPartBytes = 64 * 128;
  static constexpr int kBytes = 64 * Config::kPositions * 4;

  /// Byte of positions [4 * `unit`, 4 * `unit` + 4).
  CUTLASS_HOST_DEVICE static constexpr int offset(int channel, int unit) {
    return unit < 16 ? unit / 8 * kPartBytes + channel * 128 + ((unit ^ channel) % 8 << 4) : 2 * kPartBytes + (unit - 16) * 1024 + channel * 16;
  }
};

/// Of each of 64 channels, bias and taps in fp32.
template <class Config>
struct Fp32Taps {
  static constexpr int kValues = round_up(1 + Config::kKernelW, 4);  // of a channel
  static constexpr int kBytes = 64 * kValues * 4;

  /// Threads of a block write the table of one chunk of 64 channels, from channel `first` on.
  CUTLASS_DEVICE static void pack(Arguments const& args, char* table, int first) {
    for (int i = threadIdx.x; i < 64 * kValues; i += kPackThreads) {
      int const c = first + i / kValues, s = i % kValues - 1;
      float value = 0.f;
      if (c < Config::kC && s < 0 && Config::kDwBias) value = static_cast<float const*>(args.dw_bias)[c];
      if (c < Config::kC && s >= 0 && s < Config::kKernelW) value = static_cast<float const*>(args.dw_weight)[int64_t(c) * Config::kKernelW + s];
      reinterpret_cast<float*>(table)[i] = value;
    }
  }
};

/// A warp's 16 channels, 4 at a time. Lane: 8 adjacent outputs of a channel. Of 8 lanes that read together, 4 have each of two channels that differ
/// in the lowest bit: conflict-free.
template <class Config>
struct Fp32Depthwise {
  using R = Fp32Rows<Config>;
  using T = Fp32Taps<Config>;
  static constexpr int kFirst = Config::kPhase % 4, kUnits = ceil_div(kFirst + 8 + (Config::kKernelW - 1) * Config::kDilationW, 4);
  int channel, eight;  // the lane's first channel, and 8 outputs

  CUTLASS_DEVICE Fp32Depthwise(int first, int lane) : channel(first + lane / 16 * 2 + lane % 2), eight(lane / 2 % 8) {}

  /// Activated outputs, times `scale`, of channels `channel` + 4 * `pass`. `known`: of all 64.
  CUTLASS_DEVICE void run(int pass, char* rows, char const* table, HiddenChannel const* known, float scale) const {
    int const c = channel + 4 * pass;
    float window[4 * kUnits], taps[T::kValues], value[8] = {};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < T::kValues; i += 4) load_vector<float>(reinterpret_cast<float(&)[4]>(taps[i]), table + (c * T::kValues + i) * 4);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kUnits; ++i)
      load_vector<float>(reinterpret_cast<float(&)[4]>(window[4 * i]), rows + R::offset(c, Config::kPhase / 4 + 2 * eight + i));
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < Config::kKernelW; ++s)
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 8; ++k) value[k] = fmaf(taps[1 + s], window[kFirst + k + s * Config::kDilationW], value[k]);
    float const unit = known[c].inverse_scale;
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < 8; ++k) value[k] = fmaf(value[k], unit, taps[0]);
    activate<typename Config::MidActivation>(value);
    uint4 part[2];
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < 8; ++k) value[k] *= scale;
    part[0] = make_uint4(pack_pair<cutlass::half_t>(value[0], value[1]), pack_pair<cutlass::half_t>(value[2], value[3]),
                         pack_pair<cutlass::half_t>(value[4], value[5]), pack_pair<cutlass::half_t>(value[6], value[7]));
    part[1] = make_uint4(low_half_pair(value[0], value[1]), low_half_pair(value[2], value[3]), low_half_pair(value[4], value[5]),
                         low_half_pair(value[6], value[7]));
    __syncwarp();  // all have read
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) *reinterpret_cast<uint4*>(rows + i * R::kPartBytes + c * 128 + ((eight ^ c) % 8 << 4)) = part[i];
  }
};

}  // namespace cutlass_sep

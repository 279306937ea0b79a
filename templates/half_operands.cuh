// fp32 tensors as fp16 operands of MMAs, which have as many bits as TF32 ones, at twice the rate: what an operand is rounded from is first multiplied
// by a power of two that brings the largest of its group close to the end of fp16's range, and sums are divided by it. For fp32-grade products an
// operand has a second, low part, which is what rounding left of it: 22 bits together. The product of both low parts is left out.
//
// Groups are 8 positions of x in all channels, a row of either pointwise weight, the taps of a channel if they are operands, and, of a tile, a
// hidden channel and all activated hidden channels. The last two are scaled by bounds of their values, |W x + b| <= sum|W| max|x| + |b| and
// |activation(m)| <= |m|: they never overflow. A group with a value that is not finite, or beyond half_scale's range, becomes NaN, and so is
// computed again. Operands are at most 2^-39 of the largest of their group (or of its bound) off, so that a value loses digits below 2^-28 of it,
// in two parts, which have twice as many to lose, below 2^-17.
#pragma once

namespace cutlass_sep {

/// Workspace before the packed weights: x in fp16, [N][L][C] whatever its own layout, the low part as further channels; the inverse scale of each
/// 8 positions, [N][ceil(L / 8)].
///
/// Packed: of each chunk the taps (ToeplitzTaps, Fp32Taps) and its channels (HiddenChannel); from kPackedExpand and kPackedProject on the fp16
/// weights, the low part as further rows; from kPackedScales on the inverse scales of kTileOc rows of the project weights, and a bound of each
/// slice of hidden channels.
template <class Config>
struct HalfOperands {
  using Half = cutlass::half_t;
  using T = cute::conditional_t<Config::kParts == 2, Fp32Taps<Config>, ToeplitzTaps<Config>>;
  static constexpr int kGroup = 8;       // positions
  static constexpr int kPositions = 32;  // of a block of the packing kernel
  static constexpr int kSlice = 16;      // rows of weights of a block
  static constexpr int kChunks = ceil_div(Config::kC, 64);
  static constexpr int kSlices = ceil_div(Config::kC, kSlice);
  static constexpr int kWeightBlocks = kSlices + ceil_div(Config::kO, kSlice);
  static constexpr int kChunkBytes = T::kBytes + 64 * int(sizeof(HiddenChannel));
  static constexpr int kScaleOffset = Config::kPackedScales, kBoundOffset = kScaleOffset + Config::kTileOc * 4;
  static constexpr int kBytes = round_up(kBoundOffset + kSlices * 8, 256);
  static constexpr int kWarps = kPackThreads / 32;
  /// A window starts so many positions behind a group's first; even, so that a group has both of a pair.
  static constexpr int kSkew = (8 * 128 - ((Config::kKernelW - 1) * Config::kDilationW / 2 + Config::kPhase)) % kGroup;
  static_assert(!Config::kScaled || kSkew % 2 == 0);

  CUTLASS_DEVICE static int groups(Arguments const& args) { return ceil_div(args.w, kGroup); }
  /// Of a sequence.
  CUTLASS_DEVICE static float* group_scales(Arguments const& args, int n) {
    int64_t const x_bytes = (int64_t(args.n) * Config::kParts * Config::kExpandC * args.w * 2 + 255) / 256 * 256;
    return reinterpret_cast<float*>(static_cast<char*>(const_cast<void*>(args.x)) + x_bytes) + int64_t(n) * groups(args);
  }
  /// |m| <= x max|x| + y of all depthwise outputs m. By a warp.
  CUTLASS_DEVICE static float2 bound(Arguments const& args, int lane) {
    float2 result = make_float2(0.f, 0.f);
    for (int i = lane; i < kSlices; i += 32) {
      float2 const slice = packed<float2>(args, kBoundOffset)[i];
      result.x = fmaxf(result.x, slice.x), result.y = fmaxf(result.y, slice.y);
    }
    return make_float2(warp_max(result.x), warp_max(result.y));
  }
  template <class Value>
  CUTLASS_DEVICE static Value* packed(Arguments const& args, int offset) {
    return reinterpret_cast<Value*>(static_cast<char*>(args.workspace) + offset);
  }

  /// Block `block` of the packing kernel.
  CUTLASS_DEVICE static void pack(Arguments const& args, int block) {
    if (block < kSlices) pack_hidden(args, block);
    else if (block < kWeightBlocks) pack_project(args, block - kSlices);
    else pack_x(args, block - kWeightBlocks);
  }

 private:
  CUTLASS_DEVICE static HiddenChannel* hidden_channel(Arguments const& args, int c) {
    return packed<HiddenChannel>(args, c / 64 * kChunkBytes + T::kBytes) + c % 64;
  }

  /// N values, times `scale`, to fp16, the low part `low` elements further on.
  template <int N>
  CUTLASS_DEVICE static void store(Half* half, int64_t low, float const (&value)[N], float scale) {
    cutlass::AlignedArray<uint32_t, N / 2> high_pairs, low_pairs;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N / 2; ++i) {
      float const first = value[2 * i] * scale, second = value[2 * i + 1] * scale;
      high_pairs[i] = pack_pair<Half>(first, second), low_pairs[i] = low_half_pair(first, second);
    }
    *reinterpret_cast<decltype(high_pairs)*>(half) = high_pairs;
    if constexpr (Config::kParts == 2) *reinterpret_cast<decltype(low_pairs)*>(half + low) = low_pairs;
  }

  /// Row `index` of `Rows` of `Count` weights (a multiple of 4), by a warp: its inverse scale, and the sum of its magnitudes in `norm`.
  template <int Rows, int Count>
  CUTLASS_DEVICE static float pack_row(void const* weights, Half* halves, int index, int lane, float& norm) {
    float const* const row = static_cast<float const*>(weights) + int64_t(index) * Count;
    Half* const half = halves + int64_t(index) * Count;
    float value[4], largest = 0.f;
    norm = 0.f;
    #pragma unroll 4
    for (int i = 4 * lane; i < Count; i += 128) {
      load_vector<float>(value, row + i);
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 4; ++k) largest = fmaxf(largest, fabsf(value[k])), norm += fabsf(value[k]);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) norm += __shfl_xor_sync(0xffffffffu, norm, mask);
    float const scale = half_scale(warp_max(largest));
    #pragma unroll 4
    for (int i = 4 * lane; i < Count; i += 128) {
      load_vector<float>(value, row + i);
      store(half + i, int64_t(Rows) * Count, value, scale);
    }
    return inverse_power(scale);
  }

  /// 16 hidden channels' expand weights, what is to be known of them, and the taps of a chunk of 64.
  CUTLASS_DEVICE static void pack_hidden(Arguments const& args, int slice) {
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __shared__ float bound[2][kSlice];
    for (int i = warp; i < kSlice; i += kWarps) {
      int const c = slice * kSlice + i;
      HiddenChannel channel{};
      float of_x = 0.f, of_biases = 0.f;
      if (c < Config::kC) {
        channel.inverse_scale =
            pack_row<Config::kC, Config::kExpandC>(args.expand_weight, packed<Half>(args, Config::kPackedExpand), c, lane, channel.norm);
        if constexpr (Config::kExpandBias) channel.bias = static_cast<float const*>(args.expand_bias)[c];
        float taps = 0.f;
        for (int s = 0; s < Config::kKernelW; ++s) taps += fabsf(static_cast<float const*>(args.dw_weight)[int64_t(c) * Config::kKernelW + s]);
        of_x = channel.norm * taps;
        of_biases = fabsf(channel.bias) * taps + (Config::kDwBias ? fabsf(static_cast<float const*>(args.dw_bias)[c]) : 0.f);
      }
      if (lane == 0) {
        bound[0][i] = of_x, bound[1][i] = of_biases;
        *hidden_channel(args, c) = channel;
      }
    }
    __syncthreads();
    if (warp == 0) {
      float const of_x = warp_max(lane < kSlice ? bound[0][lane] : 0.f), of_biases = warp_max(lane < kSlice ? bound[1][lane] : 0.f);
      if (lane == 0) packed<float2>(args, kBoundOffset)[slice] = make_float2(of_x, of_biases);
    }
    // HiddenChannel of the chunk's end, and its taps.
    if (slice == kSlices - 1)
      for (int c = kSlices * kSlice + threadIdx.x; c < kChunks * 64; c += kPackThreads)
        *hidden_channel(args, c) = HiddenChannel{};
    if (slice % 4 == 0) T::pack(args, packed<char>(args, slice / 4 * kChunkBytes), slice * kSlice);
  }

  CUTLASS_DEVICE static void pack_project(Arguments const& args, int slice) {
    int const lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < kSlice; i += kWarps) {
      int const o = slice * kSlice + i;
      if (o >= Config::kO) break;
      float norm;
      float const inverse = pack_row<Config::kO, Config::kC>(args.pw_weight, packed<Half>(args, Config::kPackedProject), o, lane, norm);
      if (lane == 0) packed<float>(args, kScaleOffset)[o] = inverse;
    }
  }

  /// 32 positions of x. A thread has 4 of them in a vector of channels of every `kStep`, which it writes. Contiguous, it reads a vector of
  /// positions of each channel: x is turned in registers; a warp reads lines of 128 bytes and writes runs of 64. channels_last, a warp has 4
  /// positions in all channels, and reads runs of 512 bytes and writes ones of 256.
  CUTLASS_DEVICE static void pack_x(Arguments const& args, int block) {
    constexpr int kVector = Config::kChannelsLast ? 4 : 8, kStep = 32 * kVector;
    constexpr int kC = Config::kExpandC, kSteps = ceil_div(kC, kStep);
    int const blocks = ceil_div(args.w, kPositions), n = block / blocks;
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const offset = (Config::kChannelsLast ? warp : lane % 8) * 4, position = block % blocks * kPositions + offset;
    int const channel = (Config::kChannelsLast ? lane : warp * 4 + lane / 8) * kVector;
    auto const* const x = static_cast<float const*>(args.block_x) + int64_t(n) * kC * args.w;
    float value[kSteps][4][kVector] = {}, largest = 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      int const c = channel + step * kStep;
      if (c >= kC) continue;
      if constexpr (Config::kChannelsLast) {
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < 4; ++k)
          if (position + k < args.w) load_vector<float>(value[step][k], x + int64_t(position + k) * kC + c);
      } else if (position < args.w) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kVector; ++i) {
          float vector[4];
          load_vector<float>(vector, x + int64_t(c + i) * args.w + position);
          CUTLASS_PRAGMA_UNROLL
          for (int k = 0; k < 4; ++k) value[step][k][i] = vector[k];
        }
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4 * kVector * kSteps; ++i) largest = fmaxf(largest, fabsf(value[i / kVector / 4][i / kVector % 4][i % kVector]));
    // Of the warp's lanes in the group, and of the `kShares` warps that have part of it.
    if constexpr (Config::kChannelsLast) {
      largest = warp_max(largest);
    } else {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 8));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 16));
    }
    constexpr int kShares = Config::kChannelsLast ? kGroup / 4 : kWarps;
    __shared__ float of_group[kPositions / kGroup][kShares];
    int const group = offset / kGroup;
    of_group[group][warp % kShares] = largest;
    __syncthreads();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kShares; ++i) largest = fmaxf(largest, of_group[group][i]);
    float const scale = half_scale(largest);
    if (channel == 0 && offset % kGroup == 0 && position < args.w) group_scales(args, n)[position / kGroup] = inverse_power(scale);
    auto* const half = static_cast<Half*>(const_cast<void*>(args.x)) + int64_t(n) * args.w * Config::kParts * kC;
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      int const c = channel + step * kStep;
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 4; ++k)
        if (c < kC && position + k < args.w) store(half + int64_t(position + k) * Config::kParts * kC + c, kC, value[step][k], scale);
    }
  }
};

/// What takes sums of the first GEMM in a lane of the expand warpgroup, of two hidden channels, to rows of positions: sum * factor + bias, the factor
/// times the inverse scale of the position.
struct RowScales {
  float factor[2], bias[2], of_groups;
};

/// In the expand warpgroup: scales of a block's tiles.
template <class Config>
struct TileScales {
  using H = HalfOperands<Config>;
  using Rows = RowScales;
  float groups, ahead;  // a lane's group of 8 positions in the window: its inverse scale, in this tile and the next
  float largest;        // bound of |x| in the window
  float of_activated;   // scale of all activated hidden channels

  /// Asks for those of the tile of sequence `n` whose window starts at `window`.
  CUTLASS_DEVICE void load(Arguments const& args, int n, int window, int lane) {
    int const group = (window - H::kSkew) / H::kGroup + lane;
    bool const inside = n < args.n && lane <= Config::kPositions / H::kGroup && group >= 0 && group < H::groups(args);
    ahead = inside ? H::group_scales(args, n)[group] : 0.f;
  }
  CUTLASS_DEVICE void enter(float2 bound) {
    groups = ahead;
    largest = warp_max(groups) * 0x1p15f;
    of_activated = half_scale(fmaf(bound.x, largest, bound.y));
  }
  /// Of hidden channels `channel` and `channel` + 8 of those at `channels`; one lane `writes` their rows' inverse scales there. By the whole warp.
  CUTLASS_DEVICE RowScales rows(HiddenChannel* channels, int channel, bool writes) const {
    RowScales result;
    result.of_groups = groups;
    float inverse[2];
    CUTLASS_PRAGMA_UNROLL
    for (int h = 0; h < 2; ++h) {
      HiddenChannel const known = channels[channel + 8 * h];
      float const scale = half_scale(fmaf(known.norm, largest, fabsf(known.bias)));
      result.factor[h] = known.inverse_scale * scale;
      result.bias[h] = known.bias * scale;
      inverse[h] = inverse_power(scale);
    }
    __syncwarp();  // all have read
    if (writes) channels[channel].inverse_scale = inverse[0], channels[channel + 8].inverse_scale = inverse[1];
    return result;
  }
};

}  // namespace cutlass_sep

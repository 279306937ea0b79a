// Weights as the main kernel's shared memory wants them: stages, which a small launch before it leaves in the workspace, or which the main kernel
// fills from the tensors.
//
// Packed, the workspace is [oc tile][chunk of channels] stages; the pointwise bias [oc tiles * kTileOc] in fp32; for the split form as many inverse
// scales of output channels, then one flag a block of the packing kernel that says whether its weights did not survive the split (Inf, NaN,
// extreme scales). A stage holds the pointwise weights as K-major MMA operands [128-byte group of channels][part][kTileOc rows][128 bytes, swizzled],
// then those of DepthwiseWeights. Channels and output channels past the end are zero.
//
// Where tensor cores make the depthwise outputs, TMA brings the pointwise weights from the tensor to the same places in a stage, and behind them lies
// the table of DiagonalTaps. Warps of the main kernel make it, or the launch before, of which the workspace then has [chunk of channels] tables.
#pragma once

namespace cutlass_sep {

template <class Config>
struct DiagonalTaps;  // of diagonal_depthwise.cuh, which is not there without a kernel that takes it

template <class Config>
struct PackedWeights {
  using G = Geometry<Config>;
  using Depthwise = cute::conditional_t<G::kTensorDepthwise, DiagonalTaps<Config>, DepthwiseWeights<Config>>;
  static constexpr int kParts = OperandFragment<Config>::kParts;
  static constexpr int kOperandBytes = Config::kSplit ? 2 : G::kElementBytes;
  static constexpr int kAtomChannels = 128 / kOperandBytes;
  static constexpr int kAtoms = ceil_div(Config::kSlotChannels, kAtomChannels);
  static constexpr int kPartBytes = Config::kTileOc * 128;
  static constexpr int kPointwiseBytes = kAtoms * kParts * kPartBytes;
  static constexpr int kStageBytes = round_up(kPointwiseBytes + Depthwise::kBytes, 1024);
  static constexpr int kStages = G::kOcTiles * G::kChunks;
  static constexpr int64_t kBiasOffset = int64_t(kStages) * kStageBytes;
  static constexpr int64_t kScaleOffset = kBiasOffset + G::kOcTiles * Config::kTileOc * 4;
  static constexpr int64_t kFlagOffset = kScaleOffset + (Config::kSplit ? G::kOcTiles * Config::kTileOc * 4 : 0);
  /// A block packs kSliceRows output channels of one stage.
  static constexpr int kSliceRows = 16;
  static constexpr int kSlices = ceil_div(Config::kTileOc, kSliceRows);
  static constexpr bool kPacked = !G::kTensorDepthwise;
  static constexpr int kBlocks = kPacked ? kStages * kSlices : Config::kPacksTaps ? G::kChunks : 0;
  static constexpr int kFlags = Config::kSplit ? kBlocks : 0;
  static constexpr int64_t kUsedBytes = kPacked ? kFlagOffset + kFlags * 4 : Config::kPacksTaps ? int64_t(G::kChunks) * Depthwise::kBytes : 0;
  static constexpr int64_t kBytes = (kUsedBytes + 255) / 256 * 256;

  /// Byte, within its stage, of MMA instruction `i` (of the chunk), part `part`, row 0. An instruction's channels take 32 bytes of a row.
  CUTLASS_HOST_DEVICE static constexpr int instruction_offset(int i, int part) {
    return (i / 4 * kParts + part) * kPartBytes + i % 4 * 32;
  }
};

/// Two adjacent output channels, from `oc` (even) on: what turns a sum of the pointwise GEMM into y.
template <class Config>
struct OutputChannels {
  using P = PackedWeights<Config>;
  float bias[2] = {}, inverse_scale[2];

  CUTLASS_DEVICE OutputChannels(Arguments const& args, int oc) {
    auto const* workspace = static_cast<char const*>(args.workspace) + oc * 4;
    if constexpr (Config::kPwBias && P::kPacked) load_vector<float>(bias, workspace + P::kBiasOffset);
    if constexpr (Config::kPwBias && !P::kPacked) {
      using Element = typename Config::Element;
      auto const* const own = static_cast<Element const*>(args.pw_bias) + oc;
      if (oc + 1 < Config::kO) load_vector<Element>(bias, own);
      else if (oc < Config::kO) bias[0] = float(*own);
    }
    if constexpr (Config::kSplit) load_vector<float>(inverse_scale, workspace + P::kScaleOffset);
  }

  /// `pixel_scale`: PixelScale::inverse of the sum's pixel.
  CUTLASS_DEVICE float finish(float sum, int i, float pixel_scale) const {
    if constexpr (Config::kSplit) sum = sum * pixel_scale * inverse_scale[i];
    if constexpr (Config::kPwBias) sum += bias[i];
    return Config::Activation::apply(sum);
  }
};

/// Block `block` of PackedWeights::kBlocks, where those are tables of taps.
template <class Config>
CUTLASS_DEVICE void pack_taps(Arguments const& args, int block) {
  using T = DiagonalTaps<Config>;
  using Element = typename T::Element;
  int const first = block * Config::kSlotChannels;
  auto const* const bias = Config::kDwBias ? static_cast<Element const*>(args.dw_bias) + first : nullptr;
  T::template fill<kPackThreads / 32>(static_cast<char*>(args.workspace) + int64_t(block) * T::kBytes,
                                      static_cast<Element const*>(args.dw_weight) + int64_t(first) * T::kTaps, bias,
                                      min(Config::kSlotChannels, Config::kC - first), threadIdx.x / 32, threadIdx.x % 32);
}

/// Block `block` of PackedWeights::kBlocks.
template <class Config>
CUTLASS_DEVICE void pack_weights(Arguments const& args, int block) {
  using P = PackedWeights<Config>;
  using G = Geometry<Config>;
  using Element = typename Config::Element;
  int const slice = block % P::kSlices, index = block / P::kSlices;
  int const oc_tile = index / G::kChunks, chunk = index % G::kChunks;
  char* stage = static_cast<char*>(args.workspace) + int64_t(index) * P::kStageBytes;
  int const first_row = slice * P::kSliceRows, rows = min(P::kSliceRows, Config::kTileOc - first_row);
  auto const* pw_weight = static_cast<Element const*>(args.pw_weight);
  float check = 0.f;

  // An output channel's weights are scaled so that the largest lies in [2^7, 2^8).
  __shared__ float scale[P::kSliceRows];
  if constexpr (Config::kSplit) {
    int const first_oc = oc_tile * Config::kTileOc + first_row, lane = threadIdx.x % 32;
    float* inverse = reinterpret_cast<float*>(static_cast<char*>(args.workspace) + P::kScaleOffset) + first_oc;
    for (int row = threadIdx.x / 32; row < rows; row += kPackThreads / 32) {
      int const oc = first_oc + row;
      float largest = 0.f;
      if (oc < Config::kO)
        for (int c = lane; c < Config::kC; c += 32) largest = fmaxf(largest, fabsf(float(pw_weight[int64_t(oc) * Config::kC + c])));
      largest = warp_max(largest);
      float const unit = largest > 0.f ? inverse_power(largest) : 1.f;
      if (largest > 0.f && !PixelScale<Config>::in_scaled_range(largest)) check = __int_as_float(0x7fffffff);
      if (lane == 0) {
        scale[row] = unit * 128.f;
        inverse[row] = inverse_power(unit * 128.f);
      }
    }
    __syncthreads();
  }

  #pragma unroll 4
  for (int i = threadIdx.x; i < rows * Config::kSlotChannels; i += kPackThreads) {
    int const row = first_row + i / Config::kSlotChannels, k = i % Config::kSlotChannels;
    int const atom = k / P::kAtomChannels, e = k % P::kAtomChannels;
    int const instruction = k / G::kInstructionChannels * G::kInstructionChannels;
    int const c = chunk * Config::kSlotChannels + instruction + G::channel_of_k(k % G::kInstructionChannels);
    int const oc = oc_tile * Config::kTileOc + row;
    bool const inside = c < Config::kC && oc < Config::kO;
    Element const raw = inside ? pw_weight[int64_t(oc) * Config::kC + c] : Element(0.f);
    int const byte = e * P::kOperandBytes;
    char* target = stage + atom * P::kParts * P::kPartBytes + row * 128 + (((byte >> 4) ^ (row & 7)) << 4) + (byte & 15);
    if constexpr (Config::kSplit) {
      float const scaled = float(raw) * scale[row - first_row];
      cutlass::half_t const hi(scaled), lo(scaled - float(hi));
      *reinterpret_cast<cutlass::half_t*>(target) = hi;
      *reinterpret_cast<cutlass::half_t*>(target + P::kPartBytes) = lo;
      check = fmaf(float(lo), 0.f, check);
    } else if constexpr (G::kElementBytes == 4) {
      *reinterpret_cast<uint32_t*>(target) = tf32_operand(raw);
    } else {
      *reinterpret_cast<Element*>(target) = raw;
    }
  }

  P::Depthwise::pack(args, stage + P::kPointwiseBytes, chunk * Config::kSlotChannels, slice * kPackThreads + threadIdx.x,
                     P::kSlices * kPackThreads);

  if (chunk == 0) {
    float* bias = reinterpret_cast<float*>(static_cast<char*>(args.workspace) + P::kBiasOffset);
    int const i = oc_tile * Config::kTileOc + first_row + threadIdx.x;
    if (threadIdx.x < rows)
      bias[i] = Config::kPwBias && i < Config::kO ? float(static_cast<Element const*>(args.pw_bias)[i]) : 0.f;
  }
  if constexpr (Config::kSplit) {
    int const broken = __syncthreads_or(check != check);
    if (threadIdx.x == 0) reinterpret_cast<int*>(static_cast<char*>(args.workspace) + P::kFlagOffset)[block] = broken;
  }
}

/// Whether a weight did not survive the split. To be called by the whole warp.
template <class Config>
CUTLASS_DEVICE bool weights_broken(Arguments const& args, int lane) {
  using P = PackedWeights<Config>;
  int const* flags = reinterpret_cast<int const*>(static_cast<char const*>(args.workspace) + P::kFlagOffset);
  bool broken = false;
  for (int i = lane; i < P::kFlags; i += 32) broken |= flags[i] != 0;
  return __any_sync(0xffffffffu, broken);
}

}  // namespace cutlass_sep

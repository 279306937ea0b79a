// The 1-D block on Hopper in 16 bit: expand, depthwise, activation and project in one persistent, warp-specialised kernel. The hidden channels
// never leave the multiprocessor. fp32 tensors come as fp16 ones with scales (half_operands.cuh), written by the launch before.
//
// A tile is 128 positions of one sequence, and all output channels. For each chunk of 64 hidden channels
//   the expand warpgroup computes the chunk at every position of the window (wgmma, D[hidden channel][position]), adds its bias, puts zeros
//     outside the sequence and leaves rows of positions in shared memory;
//   the depthwise warpgroup turns the rows, in place, into activated depthwise outputs (toeplitz_depthwise.cuh);
//   those are the MN-major A operand of the second GEMM: each of two project warpgroups has 64 positions of it. (With operands in two parts, a tile
//     is 64 positions, and each of the two has half of the output channels.)
// The three work on chunks behind each other, in a ring of slots. The sums of the second GEMM start from the residual, which is x as it lies in
// shared memory; in fp32 it is added at the end, from global memory. There is no warp that does nothing but ask for what comes by TMA. Of the expand
// weights and of the taps each warp needs its own quarter, and asks for the next one itself when it is done, without waiting for others; the project
// weights are asked for by the project warpgroups, which wait most.
//
// tests/test_block_protocol.py goes through the waits and arrivals of all warps in random order: whoever changes them here changes them there.
#pragma once

namespace cutlass_sep {

template <class Config>
struct BlockLayout {
  using R = cute::conditional_t<Config::kParts == 2, Fp32Rows<Config>, PositionRows<Config>>;
  using T = cute::conditional_t<Config::kParts == 2, Fp32Taps<Config>, ToeplitzTaps<Config>>;
  static constexpr int kProjectWarpgroups = 2, kProjectWarps = 4 * kProjectWarpgroups;
  static constexpr int kProjectThreads = 128 * kProjectWarpgroups;
  static constexpr int kParts = Config::kParts;  // of an operand: 2 for fp32-grade products
  static constexpr int kTile = 64 * kProjectWarpgroups / kParts;
  static constexpr int kThreads = 256 + kProjectThreads;
  static constexpr int kChunkChannels = 64;
  static constexpr int kChunks = ceil_div(Config::kC, kChunkChannels);
  /// Whether TMA brings x as [position][channel]: channels_last, and all that is scaled, whose packing turns it.
  static constexpr bool kPixelMajor = Config::kChannelsLast || Config::kScaled;
  /// The window: kPhase positions, the halo on both sides, the tile; a multiple of 8. Else it starts where TMA can, on 16 bytes of positions, and is
  /// a multiple of 16.
  static constexpr int kPositions = Config::kPositions;
  static_assert(Config::kPhase + kTile + (Config::kKernelW - 1) * Config::kDilationW <= kPositions);
  /// Multiples of 8, other than the 128 at launch. Sums of 128 output channels or fewer leave more to the other warpgroups.
  static constexpr bool kNarrow = kParts == 1 && Config::kTileOc <= 128;
  static constexpr int kProjectRegisters = kParts == 2 ? 152 : kNarrow ? 120 : 160;
  static constexpr int kExpandRegisters =
      kParts == 2 ? 136 : kNarrow || kPositions > 152 ? 120 : Config::kScaled && kPositions <= 136 ? 112 : 104;
  static constexpr int kDepthwiseRegisters = 512 - kProjectWarpgroups * kProjectRegisters - kExpandRegisters;
  static_assert(4 * 128 == kThreads, "of the 512 registers a launch gives to a thread of each of four warpgroups");
  /// Wider tiles are two instructions: one of 256 columns would take more registers than a thread has at launch. In two parts, a half is a
  /// warpgroup's.
  static constexpr int kHalves = kParts == 2 || Config::kTileOc > 128 ? 2 : 1;
  static constexpr int kHalfOc = Config::kTileOc / kHalves;
  static constexpr int kWarpgroupOc = Config::kTileOc / kParts;
  /// x, 64 channels at a time: [position][128 bytes of channels], or [16 positions][channel][32 bytes of positions]. Swizzled.
  static constexpr int kExpandAtoms = ceil_div(Config::kExpandC, 64);
  static constexpr int kXAtomBytes = kPositions * 128, kXBlockBytes = 64 * 32;
  static constexpr int kXBytes = kParts * kExpandAtoms * kXAtomBytes;  // in two parts, the low ones behind all high ones
  /// Slots: 64 hidden channels x 64 channels of x, K-major; kHalfOc output channels x 64 hidden channels, K-major; rows and taps of 64 hidden
  /// channels, in fp32 with what else is known of them.
  static constexpr int kExpandPartBytes = 64 * 128, kExpandSlotBytes = kParts * kExpandPartBytes;
  static constexpr int kProjectSlotBytes = kHalfOc * 128;
  static constexpr int kTapsBytes = T::kBytes + (Config::kScaled ? 64 * int(sizeof(HiddenChannel)) : 0);
  static constexpr int kHiddenSlotBytes = round_up(R::kBytes + kTapsBytes, 1024);
  /// Whether the second GEMM's sums start from x.
  static constexpr bool kStartsFromX = Config::kResidual && !Config::kScaled;

  static constexpr int kExpandOffset = round_up(kXBytes, 1024);
  static constexpr int kProjectOffset = kExpandOffset + Config::kExpandSlots * kExpandSlotBytes;
  static constexpr int kHiddenOffset = kProjectOffset + Config::kProjectSlots * kProjectSlotBytes;
  static constexpr int kBiasOffset = kHiddenOffset + Config::kHiddenSlots * kHiddenSlotBytes;  // of output channels, fp32
  static constexpr int kScaleOffset = kBiasOffset + Config::kTileOc * 4;  // inverse scales of the project weights' rows
  static constexpr int kBoundOffset = kScaleOffset + (Config::kScaled ? Config::kTileOc * 4 : 0);  // HalfOperands::bound
  static constexpr int kActivatedOffset = kBoundOffset + (Config::kScaled ? 8 : 0);  // of each slot: scale of what it holds activated, its inverse
  static constexpr int kBarrierOffset = kActivatedOffset + (Config::kScaled ? 8 * Config::kHiddenSlots : 0);
  static constexpr int kBarriers = 2 * (kExpandAtoms + Config::kProjectSlots) + 4 * Config::kExpandSlots + 10 * Config::kHiddenSlots;
  static constexpr int kSharedBytes = kBarrierOffset + kBarriers * 8;
  static constexpr int kPackedBytes = Config::kScaled ? HalfOperands<Config>::kBytes : kChunks * T::kBytes;
};

/// Block `block` of the packing kernel.
template <class Config>
CUTLASS_DEVICE void pack_block1d(Arguments const& args, int block) {
  using T = typename BlockLayout<Config>::T;
  if constexpr (Config::kScaled) HalfOperands<Config>::pack(args, block);
  else T::pack(args, static_cast<char*>(args.workspace) + int64_t(block) * T::kBytes, 64 * block);
}

/// kTile positions of one sequence.
template <class Config>
struct BlockTile {
  using L = BlockLayout<Config>;
  int n, l;  // sequence, first position

  CUTLASS_DEVICE static int count(Arguments const& args) { return args.n * ceil_div(args.w, L::kTile); }
  CUTLASS_DEVICE BlockTile(Arguments const& args, int index) {
    int const tiles = ceil_div(args.w, L::kTile);
    l = index % tiles * L::kTile;
    n = index / tiles;
  }
  /// First position of the window.
  CUTLASS_DEVICE int window(Arguments const& args) const { return l - args.pad_left - Config::kPhase; }
};

template <class Config>
struct BlockShared {
  using L = BlockLayout<Config>;
  char* base;
  FullBarrier *x_full, *project_full;
  FullBarrier *expand_full, *taps_full;  // four for a slot: a warp's quarter is nobody else's
  EmptyBarrier *x_empty, *project_empty;
  EmptyBarrier *hidden_full, *operand_full, *operand_empty;  // of a slot: rows, activated rows, rows that nobody needs any more

  CUTLASS_DEVICE explicit BlockShared(char* raw) : base(raw) {
    x_full = reinterpret_cast<FullBarrier*>(base + L::kBarrierOffset);
    expand_full = x_full + L::kExpandAtoms;
    taps_full = expand_full + 4 * Config::kExpandSlots;
    project_full = taps_full + 4 * Config::kHiddenSlots;
    x_empty = reinterpret_cast<EmptyBarrier*>(project_full + Config::kProjectSlots);
    project_empty = x_empty + L::kExpandAtoms;
    hidden_full = project_empty + Config::kProjectSlots;
    operand_full = hidden_full + 4 * Config::kHiddenSlots;
    operand_empty = operand_full + Config::kHiddenSlots;
  }
  CUTLASS_DEVICE char* x() const { return base; }
  CUTLASS_DEVICE char* expand(int slot) const { return base + L::kExpandOffset + slot * L::kExpandSlotBytes; }
  CUTLASS_DEVICE char* project(int slot) const { return base + L::kProjectOffset + slot * L::kProjectSlotBytes; }
  CUTLASS_DEVICE char* hidden(int slot) const { return base + L::kHiddenOffset + slot * L::kHiddenSlotBytes; }
  CUTLASS_DEVICE char* taps(int slot) const { return hidden(slot) + L::R::kBytes; }
  CUTLASS_DEVICE HiddenChannel* channels(int slot) const { return reinterpret_cast<HiddenChannel*>(taps(slot) + L::T::kBytes); }
  CUTLASS_DEVICE float& activated_scale(int slot) const { return reinterpret_cast<float*>(base + L::kActivatedOffset)[2 * slot]; }
  CUTLASS_DEVICE float& activated_inverse_scale(int slot) const { return (&activated_scale(slot))[1]; }
  CUTLASS_DEVICE float* bias() const { return reinterpret_cast<float*>(base + L::kBiasOffset); }
  CUTLASS_DEVICE float* output_inverse_scales() const { return reinterpret_cast<float*>(base + L::kScaleOffset); }
  CUTLASS_DEVICE float2& depthwise_bound() const { return *reinterpret_cast<float2*>(base + L::kBoundOffset); }

  /// Barriers count warps, or TMA's bytes.
  CUTLASS_DEVICE void initialise() const {
    for (int i = 0; i < L::kExpandAtoms; ++i) {
      x_full[i].init(1);
      x_empty[i].init(4 + (L::kStartsFromX ? L::kProjectWarps : 0));
    }
    for (int i = 0; i < 4 * Config::kExpandSlots; ++i) expand_full[i].init(1);
    for (int i = 0; i < 4 * Config::kHiddenSlots; ++i) taps_full[i].init(1), hidden_full[i].init(1);
    for (int i = 0; i < Config::kProjectSlots; ++i) project_full[i].init(1), project_empty[i].init(L::kProjectWarps / L::kParts);
    for (int i = 0; i < Config::kHiddenSlots; ++i) {
      operand_full[i].init(4);
      operand_empty[i].init(L::kProjectWarps);
    }
    cutlass::arch::fence_barrier_init();
  }

  /// Zeros behind the rows, where taps of zero meet positions that are never written, and the bias. To be called by all threads.
  CUTLASS_DEVICE void fill(Arguments const& args) const {
    using Element = typename Config::Element;
    for (int o = threadIdx.x; o < Config::kTileOc; o += L::kThreads) {
      bias()[o] = Config::kPwBias && o < Config::kO ? float(static_cast<Element const*>(args.pw_bias)[o]) : 0.f;
      if constexpr (Config::kScaled)
        output_inverse_scales()[o] = o < Config::kO ? HalfOperands<Config>::template packed<float>(args, HalfOperands<Config>::kScaleOffset)[o] : 0.f;
    }
    if constexpr (Config::kScaled)
      if (threadIdx.x < 32) depthwise_bound() = HalfOperands<Config>::bound(args, threadIdx.x);
    if constexpr (L::kParts == 1)
      for (int slot = 0; slot < Config::kHiddenSlots; ++slot)
        for (int i = threadIdx.x * 16; i < L::R::kTails * L::R::kTailBytes; i += L::kThreads * 16)
          *reinterpret_cast<uint4*>(hidden(slot) + 2 * L::R::kBlockBytes + i) = make_uint4(0, 0, 0, 0);
  }
};

/// One arrival of the calling warp.
CUTLASS_DEVICE void arrive_warp(EmptyBarrier& barrier, int lane) {
  __syncwarp();
  if (lane == 0) barrier.arrive();
}

constexpr auto kTmaHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);

/// Tiles of this block, of all from number `index` of its own on.
template <class Config>
CUTLASS_DEVICE int own_tiles(Arguments const& args, int index = blockIdx.x) {
  return (BlockTile<Config>::count(args) - index + int(gridDim.x) - 1) / int(gridDim.x);
}

/// In place of TileScales where nothing is scaled: rows are sums and the bias.
template <class Config>
struct Unscaled {
  struct Rows {
    float bias[2] = {};
  };
  /// Of hidden channels `channel` and `channel` + 8.
  CUTLASS_DEVICE static Rows rows(Arguments const& args, int channel) {
    Rows result;
    if constexpr (Config::kExpandBias) {
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h)
        if (channel + 8 * h < Config::kC) result.bias[h] = float(static_cast<typename Config::Element const*>(args.expand_bias)[channel + 8 * h]);
    }
    return result;
  }
};

/// The expand warpgroup. Lane: positions 8j + 2t + i of hidden channels g (h = 0) and g + 8 (h = 1) of the warp's 16.
template <class Config>
struct Expand {
  using L = BlockLayout<Config>;
  using R = typename L::R;
  using Operand = typename Config::Operand;
  using Accumulator = float[L::kPositions / 2];
  using Scales = cute::conditional_t<Config::kScaled, TileScales<Config>, Unscaled<Config>>;
  using Rows = typename Scales::Rows;

  template <int... I>
  CUTLASS_DEVICE static void fma(uint64_t a, uint64_t b, Accumulator& c, bool accumulate, cute::integer_sequence<int, I...>) {
    Config::ExpandAtom::fma(a, b, c[I]..., accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }

  /// x of MMA instruction `i` (16 channels), of the low part behind those of the high one.
  CUTLASS_DEVICE static uint64_t x_descriptor(char const* x, int i) {
    if constexpr (L::kPixelMajor) return k_major_descriptor(x, i / 4 * L::kXAtomBytes + i % 4 * 32);
    return mn_major_descriptor(x, L::kXBlockBytes, i / 4 * L::kXAtomBytes + i % 4 * 16 * 32);
  }

  /// 64 channels of x under a tile. If not pixel-major, x_map has 16 positions; x_window_map has all of a window, but checks no bounds behind
  /// the first 16.
  CUTLASS_DEVICE static void load_x(Arguments const& args, cute::TmaDescriptor const& x_map, cute::TmaDescriptor const& x_window_map,
                                    BlockShared<Config> const& shared, BlockTile<Config> const& tile, int atom) {
    int const window = tile.window(args);
    auto* const full = &shared.x_full[atom];
    auto* const barrier = reinterpret_cast<uint64_t*>(full);
    full->arrive_and_expect_tx(L::kParts * L::kXAtomBytes);
    CUTLASS_PRAGMA_UNROLL
    for (int part = 0; part < L::kParts; ++part) {
      int const channel = 64 * atom + part * Config::kExpandC;
      char* const to = shared.x() + (atom + part * L::kExpandAtoms) * L::kXAtomBytes;
      if constexpr (L::kPixelMajor) {
        cute::SM90_TMA_LOAD_3D::copy(&x_window_map, barrier, kTmaHint, to, channel, window, tile.n);
      } else if (window >= 0 && window + L::kPositions <= args.w) {
        cute::SM90_TMA_LOAD_4D::copy(&x_window_map, barrier, kTmaHint, to, window, channel, 0, tile.n);
      } else {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int i = 0; i < L::kPositions / 16; ++i)
          cute::SM90_TMA_LOAD_3D::copy(&x_map, barrier, kTmaHint, to + i * L::kXBlockBytes, window + 16 * i, channel, tile.n);
      }
    }
  }

  /// MMAs over 64 channels of x, left in flight. Products of parts, of weights and of x: low and high, high and low, both high.
  CUTLASS_DEVICE static void issue(Accumulator& sum, BlockShared<Config> const& shared, RingCursor<Config::kExpandSlots> const& weight, int atom,
                                   uint32_t x_parity, bool accumulate, bool entering, int warp) {
    constexpr int kFirst = L::kParts == 2 ? 0 : 2;
    if (entering) shared.x_full[atom].wait(x_parity);
    shared.expand_full[4 * weight.slot + warp].wait(weight.parity);
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int product = kFirst; product < 3; ++product)
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 4; ++k)
        fma(k_major_descriptor(shared.expand(weight.slot), (product == 0 ? L::kExpandPartBytes : 0) + 32 * k),
            x_descriptor(shared.x(), 4 * (atom + (product == 1 ? L::kExpandAtoms : 0)) + k), sum, accumulate || product > kFirst || k > 0,
            cute::make_int_sequence<L::kPositions / 2>{});
    cute::warpgroup_commit_batch();
  }

  /// The chunk's hidden channels, without bias. `done(weight, atom)` follows the MMAs over 64 channels of x and their slot of weights.
  template <class Done>
  CUTLASS_DEVICE static void multiply(Accumulator& sum, BlockShared<Config> const& shared, RingCursor<Config::kExpandSlots>& weight,
                                      uint32_t x_parity, bool entering, int warp, Done const& done) {
    // In two parts: the tensor cores cut sums off, so that they are added up in fp32 after kRun times 64 channels.
    constexpr int kRun = L::kParts == 2 ? 2 : L::kExpandAtoms;
    Accumulator run, second;
    RingCursor<Config::kExpandSlots> previous;
    auto const finish = [&](int atom) {
      cute::warpgroup_wait<0>();
      done(previous, atom);
      if constexpr (L::kParts == 2) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < L::kPositions / 2; ++i) sum[i] = atom < kRun ? run[i] : atom < 2 * kRun ? run[i] + second[i] : sum[i] + run[i];
      }
    };
    CUTLASS_PRAGMA_UNROLL
    for (int atom = 0; atom < L::kExpandAtoms; ++atom) {
      bool const first = atom % kRun == 0, merged = first && atom > kRun;
      if (merged) finish(atom - 1);
      issue(L::kParts == 1 ? sum : atom / kRun == 1 ? second : run, shared, weight, atom, x_parity, !first, entering, warp);
      if (atom > 0 && !merged) {
        cute::warpgroup_wait<1>();
        done(previous, atom - 1);
      }
      previous = weight;
      weight.advance();
    }
    finish(L::kExpandAtoms - 1);
  }

  /// Factors of the lane's two hidden channels at positions 8j on of the window.
  CUTLASS_DEVICE static void factors(float (&factor)[2], Rows const& to, int j, int lane) {
    factor[0] = factor[1] = 1.f;
    if constexpr (Config::kScaled) {
      float const unit = __shfl_sync(0xffffffffu, to.of_groups, j + (lane % 4 * 2 + HalfOperands<Config>::kSkew) / 8);
      factor[0] = unit * to.factor[0], factor[1] = unit * to.factor[1];
    }
  }

  /// In two parts: to rows of fp32, zero but for positions [first, last) of the window.
  CUTLASS_DEVICE static void store_fp32_rows(char* rows, Accumulator const& sum, Rows const& to, int warp, int lane, int first, int last) {
    int const channel = 16 * warp + lane / 4, column = lane % 4 * 2;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < L::kPositions / 8; ++j) {
      float factor[2];
      factors(factor, to, j, lane);
      bool const inside[2] = {8 * j + column >= first && 8 * j + column < last, 8 * j + column + 1 >= first && 8 * j + column + 1 < last};
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) {
        float value[2];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) value[i] = inside[i] ? fmaf(sum[4 * j + 2 * h + i], factor[h], to.bias[h]) : 0.f;
        *reinterpret_cast<float2*>(rows + R::offset(channel + 8 * h, 2 * j + column / 4) + column % 4 * 4) = make_float2(value[0], value[1]);
      }
    }
  }

  /// To rows of positions; zero but for positions [first, last) of the window.
  template <bool kMask>
  CUTLASS_DEVICE static void store_rows(char* rows, Accumulator const& sum, Rows const& to, int warp, int lane, int first, int last) {
    // Units of 8 positions in the window, and of a row. A row starts kShift positions into the window: of a unit of a row, the last positions
    // come from the same unit of the window and the first from the one behind it. Each pair of positions keeps its place within 16 bytes, so
    // that the unit is rotated; ToeplitzDepthwise reads it so.
    constexpr int kWindow = L::kPositions / 8, kUnits = kWindow < 16 + R::kTails ? kWindow : 16 + R::kTails;
    bool const behind = lane % 4 * 2 < R::kShift;
    auto const words = [&](int j, uint32_t (&word)[2]) {
      word[0] = word[1] = 0;
      if (j >= kWindow) return;
      float factor[2];
      factors(factor, to, j, lane);
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) {
        word[h] = pack_pair<Operand>(fmaf(sum[4 * j + 2 * h], factor[h], to.bias[h]), fmaf(sum[4 * j + 2 * h + 1], factor[h], to.bias[h]));
        if constexpr (Config::kFp16Range) word[h] = half_or_nan(word[h]);
        if constexpr (kMask) {
          uint32_t const position = 8 * j + lane % 4 * 2 - first, length = last - first;
          word[h] &= (position < length ? 0xffffu : 0u) | (position + 1 < length ? 0xffff0000u : 0u);
        }
      }
    };
    // Matrix m of a store: unit u + m / 2, row half m % 2; lane l addresses row l % 8 of matrix l / 8.
    int const channel = 16 * warp + lane % 16;
    uint32_t const offset = R::offset(channel, lane / 16), tail = R::offset(channel, 16) + lane / 16 * R::kTailBytes;
    uint32_t next[2];
    words(0, next);
    CUTLASS_PRAGMA_UNROLL
    for (int u = 0; u < kUnits; u += 2) {
      uint32_t raw[4];
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < 4; m += 2) {
        uint32_t const here[2] = {next[0], next[1]};
        words(u + m / 2 + 1, next);
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h) raw[m + h] = R::kShift != 0 && behind ? next[h] : here[h];
      }
      char* const address = rows + (u < 16 ? u / 8 * R::kBlockBytes + (offset ^ u % 8 << 4) : tail + (u - 16) * R::kTailBytes);
      auto& target = *reinterpret_cast<cute::uint128_t*>(address);
      if (u + 1 < kUnits) cute::SM90_U32x4_STSM_N::copy(raw[0], raw[1], raw[2], raw[3], target);
      else cute::SM90_U32x2_STSM_N::copy(raw[0], raw[1], target);
    }
  }

  CUTLASS_DEVICE static void run(Arguments const& args, cute::TmaDescriptor const& x_map, cute::TmaDescriptor const& x_window_map,
                                 cute::TmaDescriptor const& expand_map, BlockShared<Config> const& shared) {
    int const warp = cutlass::canonical_warp_idx_sync() % 4, lane = cutlass::canonical_lane_idx();
    int const chunks = own_tiles<Config>(args) * L::kChunks;
    // 64 channels of x of the warp's 16 rows of a chunk's weights, which the MMA's other warps do not read.
    auto const load_weights = [&](int slot, int chunk, int atom) {
      auto& full = shared.expand_full[4 * slot + warp];
      full.arrive_and_expect_tx(L::kExpandSlotBytes / 4);
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < L::kParts; ++part)
        cute::SM90_TMA_LOAD_2D::copy(&expand_map, reinterpret_cast<uint64_t*>(&full), kTmaHint,
                                     shared.expand(slot) + part * L::kExpandPartBytes + warp * (L::kExpandPartBytes / 4), atom * 64,
                                     chunk * L::kChunkChannels + 16 * warp + part * Config::kC);
    };
    if (cute::elect_one_sync() && chunks > 0) {
      if (warp == 0) {
        BlockTile<Config> const tile(args, blockIdx.x);
        CUTLASS_PRAGMA_NO_UNROLL
        for (int atom = 0; atom < L::kExpandAtoms; ++atom) load_x(args, x_map, x_window_map, shared, tile, atom);
      }
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = 0; i < Config::kExpandSlots && i < chunks * L::kExpandAtoms; ++i)
        load_weights(i, i / L::kExpandAtoms % L::kChunks, i % L::kExpandAtoms);
    }
    __syncwarp();

    RingCursor<Config::kExpandSlots> weight;
    RingCursor<Config::kHiddenSlots> hidden;
    // Chunks are numbered through all tiles of the block.
    int turn = 0, chunk = 0, window = BlockTile<Config>(args, blockIdx.x).window(args);
    BlockTile<Config> next(args, blockIdx.x + gridDim.x);
    Scales scales;
    if constexpr (Config::kScaled) scales.load(args, BlockTile<Config>(args, blockIdx.x).n, window, lane);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < chunks; ++i) {
      bool const last = chunk == L::kChunks - 1;
      if constexpr (Config::kScaled) {
        if (chunk == 0) {
          scales.enter(shared.depthwise_bound());
          scales.load(args, next.n, next.window(args), lane);
        }
      }
      Rows to;
      if constexpr (!Config::kScaled) to = scales.rows(args, L::kChunkChannels * chunk + 16 * warp + lane / 4);
      Accumulator sum;
      // Asks for what comes where MMAs have read.
      auto const done = [&](RingCursor<Config::kExpandSlots> const& done, int atom) {
        // Of the weights, those that come next are kExpandSlots further on.
        int const ahead = (atom + Config::kExpandSlots) / L::kExpandAtoms;
        if (cute::elect_one_sync()) {
          if (i + ahead < chunks) load_weights(done.slot, (chunk + ahead) % L::kChunks, (atom + Config::kExpandSlots) % L::kExpandAtoms);
          if (last) shared.x_empty[atom].arrive();
          if (last && warp == 0 && i + 1 < chunks) {
            shared.x_empty[atom].wait(turn % 2);
            load_x(args, x_map, x_window_map, shared, next, atom);
          }
        }
        __syncwarp();
      };
      multiply(sum, shared, weight, turn % 2, chunk == 0, warp, done);
      char* const rows = shared.hidden(hidden.slot);
      shared.operand_empty[hidden.slot].wait(hidden.parity ^ 1);
      if constexpr (Config::kScaled) {
        shared.taps_full[4 * hidden.slot + warp].wait(hidden.parity);
        to = scales.rows(shared.channels(hidden.slot), 16 * warp + lane / 4, lane % 4 == 0);
        if (lane == 0) {  // all warps the same
          shared.activated_scale(hidden.slot) = scales.of_activated;
          shared.activated_inverse_scale(hidden.slot) = inverse_power(scales.of_activated);
        }
      }
      if constexpr (L::kParts == 2) store_fp32_rows(rows, sum, to, warp, lane, -window, args.w - window);
      else if (window >= 0 && window + L::kPositions <= args.w) store_rows<false>(rows, sum, to, warp, lane, 0, 0);
      else store_rows<true>(rows, sum, to, warp, lane, -window, args.w - window);
      arrive_warp(shared.hidden_full[4 * hidden.slot + warp], lane);
      hidden.advance();
      if (++chunk == L::kChunks) {
        chunk = 0, ++turn;
        window = next.window(args);
        next = BlockTile<Config>(args, blockIdx.x + (turn + 1) * gridDim.x);
      }
    }
  }
};

/// One thread: a chunk's project weights for half of the output channels, one part of them.
template <class Config>
CUTLASS_DEVICE void load_project_weights(cute::TmaDescriptor const& project_map, BlockShared<Config> const& shared, int slot, int chunk, int half,
                                         int part) {
  using L = BlockLayout<Config>;
  auto& full = shared.project_full[slot];
  full.arrive_and_expect_tx(L::kProjectSlotBytes);
  auto* const barrier = reinterpret_cast<uint64_t*>(&full);
  int const hidden = chunk * L::kChunkChannels, output = half * L::kHalfOc + part * Config::kO;
  char* const to = shared.project(slot);
  if constexpr (Config::kLaneOc == 2) cute::SM90_TMA_LOAD_2D::copy(&project_map, barrier, kTmaHint, to, hidden, output);
  else cute::SM90_TMA_LOAD_5D::copy(&project_map, barrier, kTmaHint, to, hidden, 0, 0, 0, output / (4 * Config::kLaneOc));
}

/// The depthwise warpgroup: each warp has 16 of a chunk's rows.
template <class Config>
struct Depthwise {
  using L = BlockLayout<Config>;
  using R = typename L::R;
  using Toeplitz = ToeplitzDepthwise<Config>;

  /// Activated outputs of 8 channels from `channel` on, in place of the rows that they came from; times `scale`, if they are scaled.
  CUTLASS_DEVICE static void store_operand(char* rows, int channel, typename Toeplitz::Value& value, float scale, int lane) {
    // Matrix m of a store: channel k + m / 2, 64 positions m % 2; its row r is a unit of 8 positions.
    uint32_t const offset = R::offset(channel + lane / 16, lane / 8 % 2 * 8 + lane % 8);
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < 8; k += 2) {
      // 16 values at a time: with 8, ptxas at times interleaves two of them only.
      if (k % 4 == 0) activate<typename Config::MidActivation>(reinterpret_cast<float(&)[16]>(value[k]));
      uint32_t packed[4];
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < 4; ++m) {
        float pair[2] = {value[k + m / 2][m % 2 * 2], value[k + m / 2][m % 2 * 2 + 1]};
        if constexpr (Config::kScaled) pair[0] *= scale, pair[1] *= scale;
        packed[m] = pack_pair<typename Config::Operand>(pair[0], pair[1]);
      }
      auto& target = *reinterpret_cast<cute::uint128_t*>(rows + k * 128 + (offset ^ k << 4));
      cute::SM90_U32x4_STSM_N::copy(packed[0], packed[1], packed[2], packed[3], target);
    }
  }

  CUTLASS_DEVICE static void run(Arguments const& args, BlockShared<Config> const& shared) {
    int const warp = cutlass::canonical_warp_idx_sync() % 4, lane = cutlass::canonical_lane_idx();
    cute::conditional_t<L::kParts == 2, Fp32Depthwise<Config>, Toeplitz> const stage(16 * warp, lane);
    int const chunks = own_tiles<Config>(args) * L::kChunks;
    // The warp's 16 channels of what is known of a chunk's, which the other warps do not read. Chunks are numbered through all tiles of the block.
    auto const load_taps = [&](int slot, int i) {
      if (i >= chunks) return;
      auto& full = shared.taps_full[4 * slot + warp];
      full.arrive_and_expect_tx(L::kTapsBytes / 4);
      auto const load = [&](int from, int bytes) {
        cute::SM90_BULK_COPY_G2S::copy(static_cast<char const*>(args.workspace) + int64_t(i % L::kChunks) * L::kTapsBytes + from,
                                       reinterpret_cast<uint64_t*>(&full), shared.taps(slot) + from, bytes);
      };
      load(warp * (L::T::kBytes / 4), L::T::kBytes / 4);
      constexpr int kKnown = (L::kTapsBytes - L::T::kBytes) / 4;
      if constexpr (kKnown > 0) load(L::T::kBytes + warp * kKnown, kKnown);
    };
    if (cute::elect_one_sync())
      for (int slot = 0; slot < Config::kHiddenSlots; ++slot) load_taps(slot, slot);
    __syncwarp();
    RingCursor<Config::kHiddenSlots> hidden;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < chunks; ++i) {
      char* const rows = shared.hidden(hidden.slot);
      shared.taps_full[4 * hidden.slot + warp].wait(hidden.parity);
      shared.hidden_full[4 * hidden.slot + warp].wait(hidden.parity);
      if constexpr (L::kParts == 2) {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int pass = 0; pass < 4; ++pass)
          stage.run(pass, rows, shared.taps(hidden.slot), shared.channels(hidden.slot), shared.activated_scale(hidden.slot));
      } else {
        CUTLASS_PRAGMA_NO_UNROLL  // else ptxas saves registers for the second 8 channels and computes the first almost one by one
        for (int first = 0; first < 16; first += 8) {
          typename Toeplitz::Value value;
          stage.compute(value, first, rows, shared.taps(hidden.slot), shared.channels(hidden.slot) + 16 * warp);
          store_operand(rows, 16 * warp + first, value, Config::kScaled ? shared.activated_scale(hidden.slot) : 1.f, lane);
        }
      }
      cutlass::arch::fence_view_async_shared();
      arrive_warp(shared.operand_full[hidden.slot], lane);
      if (cute::elect_one_sync()) load_taps(hidden.slot, i + Config::kHiddenSlots);
      __syncwarp();
      hidden.advance();
    }
  }
};

/// A project warpgroup. Lane: columns 8j + 2t + i of its 64 positions' rows g (h = 0) and g + 8 (h = 1) of the warp's 16. A column is an output
/// channel, in an order (project_map's) by which a lane has kLaneOc channels side by side of each 4 kLaneOc.
template <class Config>
struct Project {
  using L = BlockLayout<Config>;
  using R = typename L::R;
  using Element = typename Config::Element;
  static constexpr int kOc = L::kWarpgroupOc;
  using Accumulator = float[kOc / 2];
  static constexpr int kRun = Config::kLaneOc / 2;  // blocks of 8 columns in which a lane has channels side by side

  template <int Half, int... I>
  CUTLASS_DEVICE static void fma(uint64_t a, uint64_t b, Accumulator& c, bool accumulate, cute::integer_sequence<int, I...>) {
    Config::MmaAtom::fma(a, b, c[Half * L::kHalfOc / 2 + I]..., accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }

  /// sums += activated depthwise outputs x project weights, over a chunk and half of the output channels; left in flight.
  template <int Half>
  CUTLASS_DEVICE static void issue(Accumulator& acc, char const* rows, char const* weights) {
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < L::kChunkChannels / 16; ++k)
      fma<Half>(mn_major_row_descriptor(rows, k * 16 * 128), k_major_descriptor(weights, 32 * k), acc, true,
                cute::make_int_sequence<L::kHalfOc / 2>{});
    cute::warpgroup_commit_batch();
  }

  /// Whether the arithmetic was that of fp32, as far as the lane's sums tell. A hidden value that is not finite, or not in its 16-bit type, leaves no
  /// sum of its position finite; weights that no scale takes to fp16 spoil those of their output channel.
  CUTLASS_DEVICE static bool finite(Accumulator const& acc) {
    if constexpr (!Config::kScaled) return fabsf(acc[0]) < __int_as_float(0x7f800000) && fabsf(acc[2]) < __int_as_float(0x7f800000);
    float check[4] = {};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOc / 2; ++i) check[i % 4] = fmaf(acc[i], 0.f, check[i % 4]);
    float const all = (check[0] + check[1]) + (check[2] + check[3]);
    return all == all;
  }

  /// The sums of a tile; with it, the block has `left` chunks left.
  CUTLASS_DEVICE static void multiply(Accumulator& acc, float& unit, BlockShared<Config> const& shared, cute::TmaDescriptor const& project_map,
                                      RingCursor<Config::kHiddenSlots>& hidden, RingCursor<Config::kProjectSlots>& weight, int left, int warpgroup,
                                      int warp, int lane) {
    // Else ptxas takes the sums for values that are still read while MMAs run, and lets each MMA wait for the one before (C7514).
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOc / 2; ++i) cute::warpgroup_fence_operand(acc[i]);
    // The MMAs of a chunk's half are in flight while those of the next one are issued. Then their slots are given back, and a warp asks for what
    // comes there next, kProjectSlots halves further on.
    auto const give_back = [&](RingCursor<Config::kProjectSlots> const& slot, int chunk, int half) {
      arrive_warp(shared.project_empty[slot.slot], lane);
      int const next = chunk + (half + Config::kProjectSlots) / L::kHalves;
      if (warp == 0 && warpgroup == half && next < left && cute::elect_one_sync()) {
        shared.project_empty[slot.slot].wait(slot.parity);
        load_project_weights(project_map, shared, slot.slot, next % L::kChunks, (half + Config::kProjectSlots) % L::kHalves, 0);
      }
      __syncwarp();
    };
    RingCursor<Config::kProjectSlots> previous;
    int previous_hidden = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int chunk = 0; chunk < L::kChunks; ++chunk) {
      char const* const rows = shared.hidden(hidden.slot) + warpgroup * R::kBlockBytes;
      shared.operand_full[hidden.slot].wait(hidden.parity);
      if constexpr (Config::kScaled) unit = shared.activated_inverse_scale(hidden.slot);
      shared.project_full[weight.slot].wait(weight.parity);
      issue<0>(acc, rows, shared.project(weight.slot));
      cute::warpgroup_wait<1>();
      if (chunk > 0) {
        arrive_warp(shared.operand_empty[previous_hidden], lane);
        give_back(previous, chunk - 1, L::kHalves - 1);
      }
      previous = weight;
      weight.advance();
      if constexpr (L::kHalves == 2) {
        shared.project_full[weight.slot].wait(weight.parity);
        issue<1>(acc, rows, shared.project(weight.slot));
        cute::warpgroup_wait<1>();
        give_back(previous, chunk, 0);
        previous = weight;
        weight.advance();
      }
      previous_hidden = hidden.slot;
      hidden.advance();
    }
    cute::warpgroup_wait<0>();
    arrive_warp(shared.operand_empty[previous_hidden], lane);
    give_back(previous, L::kChunks - 1, L::kHalves - 1);
  }

  /// In two parts: the sums of a tile, of the warpgroup's half of the output channels. Slot 2 * warpgroup + part is always the same part's.
  CUTLASS_DEVICE static void multiply_parts(Accumulator& acc, float& unit, BlockShared<Config> const& shared, cute::TmaDescriptor const& project_map,
                                            RingCursor<Config::kHiddenSlots>& hidden, RingCursor<1>& weight, bool last_tile, int warpgroup, int warp,
                                            int lane) {
    constexpr auto indices = cute::make_int_sequence<L::kHalfOc / 2>{};
    int const high = 2 * warpgroup, low = high + 1;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int chunk = 0; chunk < L::kChunks; ++chunk) {
      // Gives back what MMAs have read of the weights; asks for the same of the next chunk.
      auto const give_back = [&](int slot) {
        arrive_warp(shared.project_empty[slot], lane);
        if (warp == 0 && cute::elect_one_sync() && !(last_tile && chunk == L::kChunks - 1)) {
          shared.project_empty[slot].wait(weight.parity);
          load_project_weights(project_map, shared, slot, (chunk + 1) % L::kChunks, warpgroup, slot - high);
        }
        __syncwarp();
      };
      // The tensor cores cut sums off: after 64 channels they are added up in fp32.
      Accumulator part;
      char const* const rows = shared.hidden(hidden.slot);
      shared.operand_full[hidden.slot].wait(hidden.parity);
      unit = shared.activated_inverse_scale(hidden.slot);
      shared.project_full[high].wait(weight.parity);
      cute::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int p = 1; p >= 0; --p)
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < L::kChunkChannels / 16; ++k)
          fma<0>(mn_major_row_descriptor(rows, p * R::kPartBytes + k * 16 * 128), k_major_descriptor(shared.project(high), 32 * k), part,
                 p == 0 || k > 0, indices);
      cute::warpgroup_commit_batch();
      shared.project_full[low].wait(weight.parity);
      cute::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < L::kChunkChannels / 16; ++k)
        fma<0>(mn_major_row_descriptor(rows, k * 16 * 128), k_major_descriptor(shared.project(low), 32 * k), part, true, indices);
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();
      give_back(high);
      cute::warpgroup_wait<0>();
      give_back(low);
      arrive_warp(shared.operand_empty[hidden.slot], lane);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kOc / 2; ++i) acc[i] += part[i];
      weight.advance();
      hidden.advance();
    }
  }

  /// The residual as the sums' first value: x at the warp's positions, from `position` of the window on (a multiple of 8 where contiguous).
  CUTLASS_DEVICE static void start(Accumulator& acc, char const* x, int position, int lane) {
    if constexpr (Config::kChannelsLast) {
      int const p = position + lane / 4, channel = lane % 4 * Config::kLaneOc;
      uint32_t const offset = p * 128 + ((p ^ channel / 8) % 8 << 4) + channel % 8 * 2;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < Config::kTileOc / 8; j += kRun)
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h) {
          float value[Config::kLaneOc];
          load_vector<Element>(value, x + j / 8 * L::kXAtomBytes + h * 8 * 128 + (offset ^ j % 8 << 4));
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < Config::kLaneOc; ++i) acc[4 * (j + i / 2) + 2 * h + i % 2] = value[i];
        }
    } else {
      // Matrix m of a load: output channels 8 (j + m / 2), row half m % 2; lane l addresses row l % 8 of matrix l / 8.
      int const p = position + lane / 8 % 2 * 8;
      uint32_t const offset = p / 16 * L::kXBlockBytes + (lane / 16 * 8 + lane % 8) * 32 + ((p / 8 ^ lane / 4) % 2 << 4);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < Config::kTileOc / 8; j += 2) {
        uint32_t raw[4];
        char const* const address = x + j / 8 * L::kXAtomBytes + j % 8 * 8 * 32 + offset;
        cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<cute::uint128_t const*>(address), raw[0], raw[1], raw[2], raw[3]);
        CUTLASS_PRAGMA_UNROLL
        for (int m = 0; m < 4; ++m) {
          auto const& pair = reinterpret_cast<cutlass::Array<Element, 2> const&>(raw[m]);
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 2; ++i) acc[4 * (j + m / 2) + 2 * (m % 2) + i] = float(pair[i]);
        }
      }
    }
  }

  /// In fp32: sums, scaled, with bias and residual, to y. `q`: the warp's first position; `first_oc`: output channel of the first column; `unit`: the
  /// inverse scale of the activated hidden channels.
  CUTLASS_DEVICE static void store_scaled(Arguments const& args, Accumulator const& acc, BlockShared<Config> const& shared, float unit, int n, int q,
                                          int first_oc, int lane) {
    // Lane (g, t): channels 8j + kLaneOc t + i of positions g and g + 8, for each run j of kRun blocks of 8 columns.
    constexpr int kLaneOc = Config::kLaneOc, kVector = !Config::kChannelsLast ? 1 : kLaneOc < 4 ? kLaneOc : 4;
    // Runs whose residual is asked for at a time: as many as there are registers for, those of sums in flight among them.
    constexpr int kBatch = (L::kParts == 2 ? 16 : 8) / kLaneOc;
    using Vector = cutlass::AlignedArray<float, kVector>;
    int const g = lane / 4, t = lane % 4;
    int64_t const position_step = Config::kChannelsLast ? Config::kO : 1, channel_step = Config::kChannelsLast ? 1 : args.w;
    int64_t const first = int64_t(n) * Config::kO * args.w + (q + g) * position_step + (first_oc + kLaneOc * t) * channel_step;
    float* y = static_cast<float*>(args.y) + first;
    float const* x = static_cast<float const*>(args.block_x) + first;
    bool const inside[2] = {q + g < args.w, q + g + 8 < args.w};
    CUTLASS_PRAGMA_UNROLL
    for (int start = 0; start < kOc / 8; start += kRun * kBatch) {
      auto const for_each_vector = [&](auto const& visit) {
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kBatch; ++r)
          CUTLASS_PRAGMA_UNROLL
          for (int h = 0; h < 2; ++h)
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kLaneOc; i += kVector) {
              int const j = start + kRun * r, oc = first_oc + 8 * j + kLaneOc * t + i;
              if (j < kOc / 8 && inside[h] && oc < Config::kO) visit(r, h, i, j, oc, (8 * kRun * r + i) * channel_step + 8 * h * position_step);
            }
      };
      float residual[kBatch][2][kLaneOc] = {};
      if constexpr (Config::kResidual)
        for_each_vector([&](int r, int h, int i, int, int, int64_t offset) {
          load_vector<float>(reinterpret_cast<float(&)[kVector]>(residual[r][h][i]), x + offset);
        });
      for_each_vector([&](int r, int h, int i, int j, int oc, int64_t offset) {
        float bias[kVector], scale[kVector];
        load_vector<float>(bias, shared.bias() + oc);
        load_vector<float>(scale, shared.output_inverse_scales() + oc);
        Vector value;
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < kVector; ++k)  // scale * unit may leave the range of fp32, sum * unit does not
          value[k] = fmaf(acc[4 * (j + (i + k) / 2) + 2 * h + (i + k) % 2] * unit, scale[k], bias[k]) + residual[r][h][i + k];
        *reinterpret_cast<Vector*>(y + offset) = value;
      });
      x += 8 * kRun * kBatch * channel_step, y += 8 * kRun * kBatch * channel_step;
    }
  }

  /// Sums, with bias, to y. `q`: the warp's first position.
  CUTLASS_DEVICE static void store(Arguments const& args, Accumulator const& acc, float const* bias, int n, int q, int lane) {
    int const g = lane / 4, t = lane % 4;
    // contiguous: lane (g, t) stores output channel 8j + g and 4 positions; channels_last: kLaneOc channels of position g.
    int const position = Config::kChannelsLast ? q + g : q + t % 2 * 8 + t / 2 * 4;
    int64_t const first = Config::kChannelsLast ? (int64_t(n) * args.w + position) * Config::kO + Config::kLaneOc * t
                                                : (int64_t(n) * Config::kO + g) * args.w + position;
    Element* y = static_cast<Element*>(args.y) + first;
    bool const inside[2] = {position < args.w, position + 8 < args.w};
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Config::kTileOc / 8; j += kRun) {
      float b[Config::kLaneOc];
      load_vector<float>(b, bias + 8 * j + Config::kLaneOc * t);
      cutlass::AlignedArray<uint32_t, kRun> word[2];  // of positions g, g + 8
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h)
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < kRun; ++k)
          word[h][k] = pack_pair<Element>(acc[4 * (j + k) + 2 * h] + b[2 * k], acc[4 * (j + k) + 2 * h + 1] + b[2 * k + 1]);
      if constexpr (Config::kChannelsLast) {
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h)
          if (inside[h] && 8 * j + Config::kLaneOc * t < Config::kO)
            *reinterpret_cast<cutlass::AlignedArray<uint32_t, kRun>*>(y + h * 8 * Config::kO) = word[h];
        y += 8 * kRun;
      } else {
        uint32_t pair[2] = {word[0][0], word[1][0]};
        // Transposed, lane (g, t) has output channel g and positions 2t, 2t + 1 of each half; lanes t and t ^ 1 then exchange halves.
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h) {
          uint32_t const source = pair[h];
          cute::SM75_U32x1_MOVM_T::copy(source, pair[h]);
        }
        uint32_t const got = __shfl_xor_sync(0xffffffffu, t % 2 ? pair[0] : pair[1], 1);
        if (inside[0] && 8 * j + g < Config::kO) *reinterpret_cast<uint2*>(y) = t % 2 ? make_uint2(got, pair[1]) : make_uint2(pair[0], got);
        y += 8 * int64_t(args.w);
      }
    }
  }

  CUTLASS_DEVICE static void run(Arguments const& args, cute::TmaDescriptor const& project_map, BlockShared<Config> const& shared, int warpgroup) {
    int const warp = cutlass::canonical_warp_idx_sync() % 4, lane = cutlass::canonical_lane_idx();
    int const first = 16 * warp + (L::kParts == 1 ? 64 * warpgroup : 0);  // position of the warp's sums within the tile
    int const first_oc = L::kParts == 1 ? 0 : kOc * warpgroup;
    if (warp == 0 && warpgroup < L::kParts && cute::elect_one_sync()) {
      int const chunks = own_tiles<Config>(args) * L::kChunks;
      if constexpr (L::kParts == 2) {
        if (chunks > 0)
          for (int part = 0; part < 2; ++part) load_project_weights(project_map, shared, 2 * warpgroup + part, 0, warpgroup, part);
      } else {
        for (int i = 0; i < Config::kProjectSlots && i / L::kHalves < chunks; ++i)
          load_project_weights(project_map, shared, i, i / L::kHalves % L::kChunks, i % L::kHalves, 0);
      }
    }
    __syncwarp();
    RingCursor<1> parts;  // of the weights' slots
    RingCursor<1> x;
    RingCursor<Config::kProjectSlots> weight;
    RingCursor<Config::kHiddenSlots> hidden;
    int const tiles = BlockTile<Config>::count(args);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
      BlockTile<Config> const tile(args, index);
      Accumulator acc;
      if constexpr (L::kStartsFromX) {
        for (int atom = 0; atom < L::kExpandAtoms; ++atom) shared.x_full[atom].wait(x.parity);
        start(acc, shared.x(), args.pad_left + Config::kPhase + first, lane);
        for (int atom = 0; atom < L::kExpandAtoms; ++atom) arrive_warp(shared.x_empty[atom], lane);
        x.advance();
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kOc / 2; ++i) acc[i] = 0.f;
      }
      float unit = 1.f;  // inverse scale of the activated hidden channels
      if constexpr (L::kParts == 2) {
        multiply_parts(acc, unit, shared, project_map, hidden, parts, index + int(gridDim.x) >= tiles, warpgroup, warp, lane);
      } else {
        multiply(acc, unit, shared, project_map, hidden, weight, own_tiles<Config>(args, index) * L::kChunks, warpgroup, warp, lane);
      }
      int const q = tile.l + first;
      if (__all_sync(0xffffffffu, finite(acc))) {
        if constexpr (Config::kScaled) store_scaled(args, acc, shared, unit, tile.n, q, first_oc, lane);
        else store(args, acc, shared.bias(), tile.n, q, lane);
      } else {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int i = 0; i < 16 && q + i < args.w; ++i) exact_block_pixel<Config>(args, tile.n, first_oc, first_oc + kOc, q + i, lane);
      }
    }
  }
};

/// Registers of each of the calling warpgroup's threads, which the launch gives 128.
template <int Registers>
CUTLASS_DEVICE void set_registers() {
  if constexpr (Registers > 128) cutlass::arch::warpgroup_reg_alloc<Registers>();
  else cutlass::arch::warpgroup_reg_dealloc<Registers>();
}

template <class Config>
CUTLASS_DEVICE void block1d_sm90(Arguments const& args, cute::TmaDescriptor const& x_map, cute::TmaDescriptor const& x_window_map,
                                 cute::TmaDescriptor const& expand_map, cute::TmaDescriptor const& project_map, char* raw) {
  using L = BlockLayout<Config>;
  BlockShared<Config> const shared(raw);
  int const warpgroup = cutlass::canonical_warp_group_idx();
  if (threadIdx.x == 0) {
    shared.initialise();
    cute::prefetch_tma_descriptor(&x_map);
    cute::prefetch_tma_descriptor(&x_window_map);
    cute::prefetch_tma_descriptor(&expand_map);
    cute::prefetch_tma_descriptor(&project_map);
  }
  await_grid_before();
  admit_next_grid();
  shared.fill(args);
  __syncthreads();
  if (warpgroup < L::kProjectWarpgroups) {
    set_registers<L::kProjectRegisters>();
    Project<Config>::run(args, project_map, shared, warpgroup);
  } else if (warpgroup == L::kProjectWarpgroups) {
    set_registers<L::kExpandRegisters>();
    Expand<Config>::run(args, x_map, x_window_map, expand_map, shared);
  } else {
    set_registers<L::kDepthwiseRegisters>();
    Depthwise<Config>::run(args, shared);
  }
}

}  // namespace cutlass_sep

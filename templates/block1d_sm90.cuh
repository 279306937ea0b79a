// The 1-D block on Hopper in 16 bit: expand, depthwise, activation and project in one persistent, warp-specialised kernel. The hidden channels
// never leave the multiprocessor.
//
// A tile is kTile positions of one sequence, and all output channels. Two producer warps bring x under the tile and its halo, the expand
// weights and the packed project and depthwise weights by TMA. For each chunk of 64 hidden channels the expand warpgroup computes the chunk
// at every position of the window (wgmma, D[hidden channel][position]), adds its bias, puts zeros outside the sequence and leaves it in
// shared memory where the separable operator keeps a row of x, pixel-major. From there on it is that operator's mainloop: each of two
// project warpgroups makes the depthwise outputs of its 64 positions in registers and feeds them to wgmma as its A operand. The sums start
// from the residual, which is x as it lies in shared memory.
#pragma once

namespace cutlass_sep {

template <class Config>
struct BlockLayout {
  using G = Geometry<Config>;
  using P = PackedWeights<Config>;
  static constexpr int kProjectWarpgroups = 2;
  static constexpr int kTile = 64 * kProjectWarpgroups;
  static constexpr int kThreads = 128 * (2 + kProjectWarpgroups);
  static constexpr int kProducerRegisters = 24, kExpandRegisters = 104, kProjectRegisters = 192;
  static constexpr int kChunkChannels = 64;
  static_assert(Config::kSlotChannels == kChunkChannels && Config::kBlocks == 1 && G::kOcTiles == 1 && G::kElementBytes == 2);
  /// The window: kPhase positions (TMA starts on 16 bytes), the halo on both sides, the tile; a multiple of 8, contiguous of 16.
  static constexpr int kPositions = Config::kPositions;
  static_assert(Config::kPhase + kTile + (Config::kKernelW - 1) * Config::kDilationW <= kPositions && kPositions <= 256);
  /// x: contiguous [16 positions][channel][32 bytes of positions]; channels_last [64 channels][position][128 bytes of channels]. Swizzled.
  static constexpr int kExpandAtoms = ceil_div(Config::kExpandC, 64);
  static constexpr int kXBlockBytes = Config::kChannelsLast ? kPositions * 128 : kExpandAtoms * 64 * 32;
  static constexpr int kXBlocks = Config::kChannelsLast ? kExpandAtoms : kPositions / 16;
  static constexpr int kXBytes = kXBlocks * kXBlockBytes;
  /// A slot of expand weights: 64 hidden channels x 64 channels of x, K-major.
  static constexpr int kExpandSlotBytes = 64 * 128;
  /// A slot of hidden channels: [position][128 bytes], swizzled as PixelMajorRow reads it.
  static constexpr int kHiddenSlotBytes = round_up(kPositions * 128, 1024);

  /// Longer kernels are looped over: the registers beside the sums hold no longer window.
  static constexpr bool kRolled = G::kWindowQ > 18;

  static constexpr int kExpandOffset = kXBytes;
  static constexpr int kHiddenOffset = kExpandOffset + Config::kExpandSlots * kExpandSlotBytes;
  static constexpr int kWeightOffset = kHiddenOffset + Config::kHiddenSlots * kHiddenSlotBytes;
  static constexpr int kBarrierOffset = kWeightOffset + Config::kWeightSlots * P::kStageBytes;
  static constexpr int kBarriers = 2 * (1 + Config::kExpandSlots + Config::kHiddenSlots + Config::kWeightSlots);
  static constexpr int kSharedBytes = kBarrierOffset + kBarriers * 8;
};

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
  FullBarrier *x_full, *expand_full, *weight_full;
  EmptyBarrier *hidden_full, *x_empty, *expand_empty, *weight_empty, *hidden_empty;

  CUTLASS_DEVICE explicit BlockShared(char* raw) : base(raw) {
    x_full = reinterpret_cast<FullBarrier*>(base + L::kBarrierOffset);
    expand_full = x_full + 1;
    weight_full = expand_full + Config::kExpandSlots;
    hidden_full = reinterpret_cast<EmptyBarrier*>(weight_full + Config::kWeightSlots);
    x_empty = hidden_full + Config::kHiddenSlots;
    expand_empty = x_empty + 1;
    weight_empty = expand_empty + Config::kExpandSlots;
    hidden_empty = weight_empty + Config::kWeightSlots;
  }
  CUTLASS_DEVICE char* x() const { return base; }
  CUTLASS_DEVICE char* expand(int slot) const { return base + L::kExpandOffset + slot * L::kExpandSlotBytes; }
  CUTLASS_DEVICE char* hidden(int slot) const { return base + L::kHiddenOffset + slot * L::kHiddenSlotBytes; }
  CUTLASS_DEVICE char* weights(int slot) const { return base + L::kWeightOffset + slot * L::P::kStageBytes; }

  /// Barriers count warps, and TMA's bytes.
  CUTLASS_DEVICE void initialise() const {
    constexpr int kProjectWarps = 4 * L::kProjectWarpgroups;
    x_full->init(1);
    x_empty->init(4 + (Config::kResidual ? kProjectWarps : 0));
    for (int i = 0; i < Config::kExpandSlots; ++i) expand_full[i].init(1), expand_empty[i].init(4);
    for (int i = 0; i < Config::kWeightSlots; ++i) weight_full[i].init(1), weight_empty[i].init(kProjectWarps);
    for (int i = 0; i < Config::kHiddenSlots; ++i) hidden_full[i].init(4), hidden_empty[i].init(kProjectWarps);
    cutlass::arch::fence_barrier_init();
  }
};

/// One arrival of the calling warp.
CUTLASS_DEVICE void arrive_warp(EmptyBarrier& barrier, int lane) {
  __syncwarp();
  if (lane == 0) barrier.arrive();
}

/// One thread: x and the expand weights of every tile.
template <class Config>
CUTLASS_DEVICE void produce_expand(Arguments const& args, cute::TmaDescriptor const& x_map, cute::TmaDescriptor const& expand_map,
                                   BlockShared<Config> const& shared) {
  using L = BlockLayout<Config>;
  constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  RingCursor<1> x;
  RingCursor<Config::kExpandSlots> weight;
  int const tiles = BlockTile<Config>::count(args);
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    BlockTile<Config> const tile(args, index);
    int const window = tile.window(args);
    shared.x_empty->wait(x.parity ^ 1);
    shared.x_full->arrive_and_expect_tx(L::kXBytes);
    for (int i = 0; i < L::kXBlocks; ++i) {
      int const inner = Config::kChannelsLast ? 64 * i : window + 16 * i, outer = Config::kChannelsLast ? window : 0;
      cute::SM90_TMA_LOAD_3D::copy(&x_map, reinterpret_cast<uint64_t*>(shared.x_full), kHint, shared.x() + i * L::kXBlockBytes, inner, outer,
                                   tile.n);
    }
    x.advance();
    for (int chunk = 0; chunk < L::G::kChunks; ++chunk)
      for (int atom = 0; atom < L::kExpandAtoms; ++atom) {
        shared.expand_empty[weight.slot].wait(weight.parity ^ 1);
        auto& full = shared.expand_full[weight.slot];
        full.arrive_and_expect_tx(L::kExpandSlotBytes);
        cute::SM90_TMA_LOAD_2D::copy(&expand_map, reinterpret_cast<uint64_t*>(&full), kHint, shared.expand(weight.slot), 64 * atom,
                                     L::kChunkChannels * chunk);
        weight.advance();
      }
  }
}

/// One thread: the packed project and depthwise weights of every tile.
template <class Config>
CUTLASS_DEVICE void produce_project(Arguments const& args, BlockShared<Config> const& shared) {
  using P = PackedWeights<Config>;
  RingCursor<Config::kWeightSlots> weight;
  int const tiles = BlockTile<Config>::count(args);
  for (int index = blockIdx.x; index < tiles; index += gridDim.x)
    for (int chunk = 0; chunk < BlockLayout<Config>::G::kChunks; ++chunk) {
      shared.weight_empty[weight.slot].wait(weight.parity ^ 1);
      auto& full = shared.weight_full[weight.slot];
      full.arrive_and_expect_tx(P::kStageBytes);
      cute::SM90_BULK_COPY_G2S::copy(static_cast<char const*>(args.workspace) + int64_t(chunk) * P::kStageBytes,
                                     reinterpret_cast<uint64_t*>(&full), shared.weights(weight.slot), P::kStageBytes);
      weight.advance();
    }
}

/// The expand warpgroup. Lane: positions 8j + 2t + i of hidden channels g (h = 0) and g + 8 (h = 1) of the warp's 16.
template <class Config>
struct Expand {
  using L = BlockLayout<Config>;
  using Element = typename Config::Element;
  using Accumulator = float[L::kPositions / 2];

  template <int... I>
  CUTLASS_DEVICE static void fma(uint64_t a, uint64_t b, Accumulator& c, bool accumulate, cute::integer_sequence<int, I...>) {
    Config::ExpandAtom::fma(a, b, c[I]..., accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }

  /// x of MMA instruction `i` (16 channels).
  CUTLASS_DEVICE static uint64_t x_descriptor(char const* x, int i) {
    if constexpr (Config::kChannelsLast) return k_major_descriptor(x + i / 4 * L::kXBlockBytes + i % 4 * 32);
    return mn_major_descriptor(x + i * 16 * 32, L::kXBlockBytes);
  }

  CUTLASS_DEVICE static void run(Arguments const& args, BlockShared<Config> const& shared) {
    int const warp = cutlass::canonical_warp_idx_sync() % 4, lane = cutlass::canonical_lane_idx();
    RingCursor<1> x;
    RingCursor<Config::kExpandSlots> weight;
    RingCursor<Config::kHiddenSlots> hidden;
    int const tiles = BlockTile<Config>::count(args);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
      int const window = BlockTile<Config>(args, index).window(args);
      bool const inside = window >= 0 && window + L::kPositions <= args.w;
      shared.x_full->wait(x.parity);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int chunk = 0; chunk < L::G::kChunks; ++chunk) {
        float bias[2] = {};
        if constexpr (Config::kExpandBias) {
          CUTLASS_PRAGMA_UNROLL
          for (int h = 0; h < 2; ++h) {
            int const channel = L::kChunkChannels * chunk + 16 * warp + lane / 4 + 8 * h;
            if (channel < Config::kC) bias[h] = float(static_cast<Element const*>(args.expand_bias)[channel]);
          }
        }
        Accumulator sum;
        multiply(sum, shared, weight, lane);
        if (chunk == L::G::kChunks - 1) arrive_warp(*shared.x_empty, lane);
        shared.hidden_empty[hidden.slot].wait(hidden.parity ^ 1);
        if (inside) store<false>(shared.hidden(hidden.slot), sum, bias, warp, lane, 0, 0);
        else store<true>(shared.hidden(hidden.slot), sum, bias, warp, lane, -window, args.w - window);
        arrive_warp(shared.hidden_full[hidden.slot], lane);
        hidden.advance();
      }
      x.advance();
    }
  }

  CUTLASS_DEVICE static void multiply(Accumulator& sum, BlockShared<Config> const& shared, RingCursor<Config::kExpandSlots>& weight, int lane) {
    using Indices = cute::make_int_sequence<L::kPositions / 2>;
    int previous = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int atom = 0; atom < L::kExpandAtoms; ++atom) {
      shared.expand_full[weight.slot].wait(weight.parity);
      char const* const weights = shared.expand(weight.slot);
      cute::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 4; ++k)
        fma(k_major_descriptor(weights + 32 * k), x_descriptor(shared.x(), 4 * atom + k), sum, atom + k > 0, Indices{});
      cute::warpgroup_commit_batch();
      if (atom > 0) {
        cute::warpgroup_wait<1>();
        arrive_warp(shared.expand_empty[previous], lane);
      }
      previous = weight.slot;
      weight.advance();
    }
    cute::warpgroup_wait<0>();
    arrive_warp(shared.expand_empty[previous], lane);
  }

  /// To shared memory, transposed: a position's channels are contiguous there. Zero but for positions [first, last) of the window.
  template <bool kMask>
  CUTLASS_DEVICE static void store(char* hidden, Accumulator const& sum, float const (&bias)[2], int warp, int lane, int first, int last) {
    // Matrix m of a store: channels g + 8 (m % 2) of 8 positions 8 (j + m / 2); lane l addresses row l % 8 of matrix l / 8.
    int const unit = 2 * warp + lane / 8 % 2, row = lane % 8;
    uint32_t const offset = (lane / 16 * 8 + row) * 128 + ((unit ^ row) << 4);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < L::kPositions / 8; j += 2) {
      uint32_t packed[4];
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < 4; ++m) {
        int const k = j + m / 2 < L::kPositions / 8 ? j + m / 2 : j;
        float value[2];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          value[i] = sum[4 * k + 2 * (m % 2) + i] + bias[m % 2];
          if constexpr (Config::kFp16Range) value[i] = HalfOrNan::apply(value[i]);
          int const position = 8 * k + lane % 4 * 2 + i;
          if (kMask && (position < first || position >= last)) value[i] = 0.f;
        }
        packed[m] = pack_pair<Element>(value[0], value[1]);
      }
      char* const target = hidden + j * 8 * 128 + offset;
      if (j + 1 < L::kPositions / 8)
        cute::SM90_U16x8_STSM_T::copy(packed[0], packed[1], packed[2], packed[3], *reinterpret_cast<cute::uint128_t*>(target));
      else  // lanes beyond 15 address nothing
        cute::SM90_U16x4_STSM_T::copy(packed[0], packed[1], *reinterpret_cast<cute::uint128_t*>(target));
    }
  }
};

/// A project warpgroup: the mainloop of the separable operator over chunks of hidden channels.
template <class Config>
struct Project {
  using G = Geometry<Config>;
  using L = BlockLayout<Config>;
  using P = PackedWeights<Config>;
  using Element = typename Config::Element;
  using Accumulator = float[1][Config::kTileOc / 2];
  /// Wider tiles are two instructions: one of 256 columns would take more registers than a thread has at launch.
  static constexpr int kHalves = Config::kTileOc > 128 ? 2 : 1;
  static constexpr int kHalfOc = Config::kTileOc / kHalves;

  template <int Half, int... I>
  CUTLASS_DEVICE static void fma(uint32_t const (&a)[4], uint64_t b, Accumulator& c, bool accumulate, cute::integer_sequence<int, I...>) {
    Config::MmaAtom::fma(a[0], a[1], a[2], a[3], b, c[0][Half * kHalfOc / 2 + I]...,
                         accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }

  CUTLASS_DEVICE static void issue(Accumulator& acc, OperandFragment<Config> const& fragment, char const* weights, int step, bool accumulate) {
    using Indices = cute::make_int_sequence<kHalfOc / 2>;
    cute::warpgroup_arrive();
    uint64_t const b = k_major_descriptor(weights + P::instruction_offset(step, 0));
    fma<0>(fragment.a[0][0], b, acc, accumulate, Indices{});
    if constexpr (kHalves == 2) fma<1>(fragment.a[0][0], b + (kHalfOc * 128 >> 4), acc, accumulate, Indices{});
    cute::warpgroup_commit_batch();
  }

  /// The residual, x at the lane's positions (`position` and the next one of the window) and output channels, as the sums' first value.
  CUTLASS_DEVICE static void start(Accumulator& acc, char const* x, int position, int t) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Config::kTileOc / 8; ++j)
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 2; ++k) {
        float value[2];
        if constexpr (Config::kChannelsLast) {
          int const p = position + k;
          load_vector<Element>(value, x + j / 8 * L::kXBlockBytes + p * 128 + (((j % 8) ^ (p & 7)) << 4) + 4 * t);
          acc[0][4 * j + 2 * k] = value[0], acc[0][4 * j + 2 * k + 1] = value[1];
        } else {
          int const channel = 8 * j + 2 * t + k, byte = position % 16 * 2;
          load_vector<Element>(value, x + position / 16 * L::kXBlockBytes + channel * 32 + (byte ^ (channel >> 2 & 1) << 4));
          acc[0][4 * j + k] = value[0], acc[0][4 * j + 2 + k] = value[1];
        }
      }
  }

  CUTLASS_DEVICE static void run(Arguments const& args, BlockShared<Config> const& shared, int warpgroup) {
    int const warp = cutlass::canonical_warp_idx_sync() % 4, lane = cutlass::canonical_lane_idx();
    int const g = lane / 4, t = lane % 4;
    int const first = 64 * warpgroup + 16 * warp;  // position of the warp within the tile
    int const column = Config::kPhase + first + 2 * g;
    PixelMajorRow<Config> const view(column, t);
    RingCursor<1> x;
    RingCursor<Config::kWeightSlots> weight;
    RingCursor<Config::kHiddenSlots> hidden;
    PixelScale<Config> const scale;

    int const tiles = BlockTile<Config>::count(args);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
      BlockTile<Config> const tile(args, index);
      float check = 0.f;
      Accumulator acc;
      if constexpr (Config::kResidual) {
        shared.x_full->wait(x.parity);
        start(acc, shared.x(), column + args.pad_left, t);
        arrive_warp(*shared.x_empty, lane);
        x.advance();
      }
      bool accumulate = Config::kResidual;
      int release = -1;  // slot of weights whose last MMAs are in flight
      CUTLASS_PRAGMA_NO_UNROLL
      for (int chunk = 0; chunk < G::kChunks; ++chunk) {
        shared.weight_full[weight.slot].wait(weight.parity);
        shared.hidden_full[hidden.slot].wait(hidden.parity);
        char const* const weights = shared.weights(weight.slot);
        char const* const row = shared.hidden(hidden.slot);
        auto const* depthwise_weights = reinterpret_cast<float const*>(weights + P::kPointwiseBytes);
        int const steps = ceil_div(min(L::kChunkChannels, Config::kC - chunk * L::kChunkChannels), G::kStepChannels);
        CUTLASS_PRAGMA_NO_UNROLL
        for (int s = 0; s < steps; ++s) {
          typename DepthwiseOperand<Config>::Value value[1];
          DepthwiseWeights<Config> const step_weights(depthwise_weights, s, t);
          if constexpr (L::kRolled) RolledDepthwise<Config>::compute(value[0], row, 0, 0, step_weights, column, t, s);
          else DepthwiseOperand<Config>::compute(value[0], view, [&](int) { return row; }, step_weights, s, 0);
          cute::warpgroup_wait<0>();
          if (release >= 0) {
            arrive_warp(shared.weight_empty[release], lane);
            release = -1;
          }
          OperandFragment<Config> fragment;
          fragment.assign(value, scale, check);
          issue(acc, fragment, weights, s, accumulate);
          accumulate = true;
        }
        arrive_warp(shared.hidden_empty[hidden.slot], lane);
        release = weight.slot;
        hidden.advance();
        weight.advance();
      }
      cute::warpgroup_wait<0>();
      arrive_warp(shared.weight_empty[release], lane);

      int const q = tile.l + first;
      if (__any_sync(0xffffffffu, check != check)) {
        for (int i = 0; i < 16 && q + i < args.w; ++i) exact_block_pixel<Config>(args, tile.n, 0, Config::kO, q + i, lane);
      } else {
        DirectEpilogue<Config>::store(args, acc, scale, tile.n, 0, 0, q + 2 * g, t);
      }
    }
  }
};

template <class Config>
CUTLASS_DEVICE void block1d_sm90(Arguments const& args, cute::TmaDescriptor const& x_map, cute::TmaDescriptor const& expand_map, char* raw) {
  using L = BlockLayout<Config>;
  BlockShared<Config> const shared(raw);
  int const warpgroup = cutlass::canonical_warp_group_idx();
  if (threadIdx.x == 0) {
    shared.initialise();
    cute::prefetch_tma_descriptor(&x_map);
    cute::prefetch_tma_descriptor(&expand_map);
  }
  __syncthreads();
  if (warpgroup == L::kProjectWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<L::kExpandRegisters>();
    Expand<Config>::run(args, shared);
  } else if (warpgroup > L::kProjectWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<L::kProducerRegisters>();
    int const thread = threadIdx.x - 128 * (L::kProjectWarpgroups + 1);
    if (thread == 0) produce_expand<Config>(args, x_map, expand_map, shared);
    else if (thread == 32) produce_project<Config>(args, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<L::kProjectRegisters>();
    Project<Config>::run(args, shared, warpgroup);
  }
}

}  // namespace cutlass_sep

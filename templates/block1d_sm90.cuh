// The 1-D block on Hopper in 16 bit: expand, depthwise, activation and project in one persistent, warp-specialised kernel. The hidden channels
// never leave the multiprocessor.
//
// A tile is kTile positions of one sequence, and all output channels. Producer warps bring x under the tile and its halo and all weights by
// TMA. For each chunk of 64 hidden channels the expand warpgroup computes the chunk at every position of the window (wgmma, D[hidden
// channel][position]), adds its bias, puts zeros outside the sequence and leaves rows of positions in shared memory. The warps of two
// project warpgroups turn 8 rows each, in place, into activated depthwise outputs (toeplitz_depthwise.cuh), which are then the MN-major A
// operand of the second GEMM: each project warpgroup has 64 positions of it. Its sums start from the residual, which is x as it lies in shared
// memory.
#pragma once

namespace cutlass_sep {

template <class Config>
struct BlockLayout {
  using R = PositionRows<Config>;
  using T = ToeplitzTaps<Config>;
  static constexpr int kProjectWarpgroups = 2;
  static constexpr int kProjectThreads = 128 * kProjectWarpgroups;
  static constexpr int kTile = 64 * kProjectWarpgroups;
  static constexpr int kThreads = 256 + kProjectThreads;
  static constexpr int kChunkChannels = 64;
  static constexpr int kChunks = ceil_div(Config::kC, kChunkChannels);
  /// The window: kPhase positions (TMA starts on 16 bytes), the halo on both sides, the tile; a multiple of 8, contiguous of 16.
  static constexpr int kPositions = Config::kPositions;
  static_assert(Config::kPhase + kTile + (Config::kKernelW - 1) * Config::kDilationW <= kPositions);
  static constexpr int kProducerRegisters = 24;
  static constexpr int kExpandRegisters = kPositions <= 152 ? 104 : 120;
  static constexpr int kProjectRegisters = (512 - kProducerRegisters - kExpandRegisters) / kProjectWarpgroups;
  /// x: contiguous [16 positions][channel][32 bytes of positions]; channels_last [64 channels][position][128 bytes of channels]. Swizzled.
  static constexpr int kExpandAtoms = ceil_div(Config::kExpandC, 64);
  static constexpr int kXBlockBytes = Config::kChannelsLast ? kPositions * 128 : kExpandAtoms * 64 * 32;
  static constexpr int kXBlocks = Config::kChannelsLast ? kExpandAtoms : kPositions / 16;
  static constexpr int kXBytes = kXBlocks * kXBlockBytes;
  /// Slots: 64 hidden channels x 64 channels of x, K-major; kTileOc output channels x 64 hidden channels, K-major; rows and taps of 64 hidden
  /// channels.
  static constexpr int kExpandSlotBytes = 64 * 128;
  static constexpr int kProjectSlotBytes = Config::kTileOc * 128;
  static constexpr int kHiddenSlotBytes = round_up(R::kBytes + T::kBytes, 1024);

  static constexpr int kExpandOffset = round_up(kXBytes, 1024);
  static constexpr int kProjectOffset = kExpandOffset + Config::kExpandSlots * kExpandSlotBytes;
  static constexpr int kHiddenOffset = kProjectOffset + Config::kProjectSlots * kProjectSlotBytes;
  static constexpr int kBarrierOffset = kHiddenOffset + Config::kHiddenSlots * kHiddenSlotBytes;
  static constexpr int kBarriers = 2 * (1 + Config::kExpandSlots + Config::kProjectSlots + Config::kHiddenSlots);
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
  FullBarrier *x_full, *expand_full, *project_full, *hidden_full;
  EmptyBarrier *x_empty, *expand_empty, *project_empty, *hidden_empty;

  CUTLASS_DEVICE explicit BlockShared(char* raw) : base(raw) {
    x_full = reinterpret_cast<FullBarrier*>(base + L::kBarrierOffset);
    expand_full = x_full + 1;
    project_full = expand_full + Config::kExpandSlots;
    hidden_full = project_full + Config::kProjectSlots;
    x_empty = reinterpret_cast<EmptyBarrier*>(hidden_full + Config::kHiddenSlots);
    expand_empty = x_empty + 1;
    project_empty = expand_empty + Config::kExpandSlots;
    hidden_empty = project_empty + Config::kProjectSlots;
  }
  CUTLASS_DEVICE char* x() const { return base; }
  CUTLASS_DEVICE char* expand(int slot) const { return base + L::kExpandOffset + slot * L::kExpandSlotBytes; }
  CUTLASS_DEVICE char* project(int slot) const { return base + L::kProjectOffset + slot * L::kProjectSlotBytes; }
  CUTLASS_DEVICE char* hidden(int slot) const { return base + L::kHiddenOffset + slot * L::kHiddenSlotBytes; }
  CUTLASS_DEVICE char* taps(int slot) const { return hidden(slot) + L::R::kBytes; }

  /// Barriers count warps, and producers with their bytes.
  CUTLASS_DEVICE void initialise() const {
    constexpr int kExpandWarps = 4, kProjectWarps = 4 * L::kProjectWarpgroups;
    x_full->init(1);
    x_empty->init(kExpandWarps + (Config::kResidual ? kProjectWarps : 0));
    for (int i = 0; i < Config::kExpandSlots; ++i) expand_full[i].init(1), expand_empty[i].init(kExpandWarps);
    for (int i = 0; i < Config::kProjectSlots; ++i) project_full[i].init(1), project_empty[i].init(kProjectWarps);
    for (int i = 0; i < Config::kHiddenSlots; ++i) hidden_full[i].init(kExpandWarps + 1), hidden_empty[i].init(kProjectWarps);
    cutlass::arch::fence_barrier_init();
  }

  /// Zeros behind the rows, where taps of zero meet positions that are never written. To be called by all threads.
  CUTLASS_DEVICE void clear_tails() const {
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
    for (int chunk = 0; chunk < L::kChunks; ++chunk)
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

/// One thread: the project weights of every tile.
template <class Config>
CUTLASS_DEVICE void produce_project(Arguments const& args, cute::TmaDescriptor const& project_map, BlockShared<Config> const& shared) {
  using L = BlockLayout<Config>;
  constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  RingCursor<Config::kProjectSlots> slot;
  int const tiles = BlockTile<Config>::count(args);
  for (int index = blockIdx.x; index < tiles; index += gridDim.x)
    for (int chunk = 0; chunk < L::kChunks; ++chunk) {
      shared.project_empty[slot.slot].wait(slot.parity ^ 1);
      auto& full = shared.project_full[slot.slot];
      full.arrive_and_expect_tx(L::kProjectSlotBytes);
      cute::SM90_TMA_LOAD_2D::copy(&project_map, reinterpret_cast<uint64_t*>(&full), kHint, shared.project(slot.slot),
                                   L::kChunkChannels * chunk, 0);
      slot.advance();
    }
}

/// One thread: the taps of every tile, beside the hidden channels that they belong to.
template <class Config>
CUTLASS_DEVICE void produce_taps(Arguments const& args, BlockShared<Config> const& shared) {
  using L = BlockLayout<Config>;
  RingCursor<Config::kHiddenSlots> hidden;
  int const tiles = BlockTile<Config>::count(args);
  for (int index = blockIdx.x; index < tiles; index += gridDim.x)
    for (int chunk = 0; chunk < L::kChunks; ++chunk) {
      shared.hidden_empty[hidden.slot].wait(hidden.parity ^ 1);
      auto& full = shared.hidden_full[hidden.slot];
      full.arrive_and_expect_tx(L::T::kBytes);
      cute::SM90_BULK_COPY_G2S::copy(static_cast<char const*>(args.workspace) + int64_t(chunk) * L::T::kBytes,
                                     reinterpret_cast<uint64_t*>(&full), shared.taps(hidden.slot), L::T::kBytes);
      hidden.advance();
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
      for (int chunk = 0; chunk < L::kChunks; ++chunk) {
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
        if (chunk == L::kChunks - 1) arrive_warp(*shared.x_empty, lane);
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

  /// To rows of positions; zero but for positions [first, last) of the window.
  template <bool kMask>
  CUTLASS_DEVICE static void store(char* rows, Accumulator const& sum, float const (&bias)[2], int warp, int lane, int first, int last) {
    using R = typename L::R;
    // The row starts an even number of positions into the window. What that shifts across a unit of 8 positions goes to the unit before.
    constexpr int kShift = Config::kPhase / 2 * 2;
    static_assert(kShift < 8);
    int const channel = 16 * warp + lane / 4, within = lane % 4 * 2 - kShift;
    bool const carry = within < 0;
    int const byte = (within & 7) * 2;
    int unit_offset[8];  // of units 0 to 7, for window units 0 to 7
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 8; ++j)
      unit_offset[j] = byte + (carry ? (j == 0 ? R::offset(channel, 7) - R::kBlockBytes : R::offset(channel, j - 1)) : R::offset(channel, j));
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < L::kPositions / 8; ++j)
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) {
        float value[2];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          value[i] = sum[4 * j + 2 * h + i] + bias[h];
          if constexpr (Config::kFp16Range) value[i] = HalfOrNan<Element>::apply(value[i]);
          int const position = 8 * j + lane % 4 * 2 + i;
          if (kMask && (position < first || position >= last)) value[i] = 0.f;
        }
        uint32_t const word = pack_pair<Element>(value[0], value[1]);
        auto const put = [&](int offset) { *reinterpret_cast<uint32_t*>(rows + offset) = word; };
        if (j < 16) {
          if (j > 0 || !carry) put(unit_offset[j % 8] + j / 8 * R::kBlockBytes + h * 8 * 128);
        } else {
          int const unit = j - carry;
          if (unit < 16 + R::kTails) put(R::offset(channel + 8 * h, unit) + byte);
        }
      }
  }
};

/// A project warpgroup. Lane: output channels 8j + 2t + i of its 64 positions' rows g (h = 0) and g + 8 (h = 1) of the warp's 16.
template <class Config>
struct Project {
  using L = BlockLayout<Config>;
  using R = PositionRows<Config>;
  using Element = typename Config::Element;
  using Accumulator = float[Config::kTileOc / 2];
  using Depthwise = ToeplitzDepthwise<Config>;
  /// Wider tiles are two instructions: one of 256 columns would take more registers than a thread has at launch.
  static constexpr int kHalves = Config::kTileOc > 128 ? 2 : 1;
  static constexpr int kHalfOc = Config::kTileOc / kHalves;

  template <int Half, int... I>
  CUTLASS_DEVICE static void fma(uint64_t a, uint64_t b, Accumulator& c, bool accumulate, cute::integer_sequence<int, I...>) {
    Config::MmaAtom::fma(a, b, c[Half * kHalfOc / 2 + I]..., accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }

  /// sums += activated depthwise outputs x project weights over a chunk; left in flight.
  CUTLASS_DEVICE static void issue(Accumulator& acc, char const* rows, char const* weights, bool accumulate) {
    using Indices = cute::make_int_sequence<kHalfOc / 2>;
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < L::kChunkChannels / 16; ++k) {
      uint64_t const a = mn_major_row_descriptor(rows + k * 16 * 128), b = k_major_descriptor(weights + 32 * k);
      fma<0>(a, b, acc, accumulate || k > 0, Indices{});
      if constexpr (kHalves == 2) fma<1>(a, b + (kHalfOc * 128 >> 4), acc, accumulate || k > 0, Indices{});
    }
    cute::warpgroup_commit_batch();
  }

  /// The residual as the sums' first value: x at the warp's positions, from `position` of the window on (a multiple of 8 where contiguous).
  CUTLASS_DEVICE static void start(Accumulator& acc, char const* x, int position, int lane) {
    // Matrix m of a load: output channels 8 (j + m / 2), row half m % 2; lane l addresses row l % 8 of matrix l / 8.
    int const p = position + lane / 8 % 2 * 8 + (Config::kChannelsLast ? lane % 8 : 0);
    uint32_t const offset = Config::kChannelsLast ? p * 128 + ((p ^ lane / 16) % 8 << 4)
                                                  : p / 16 * L::kXBlockBytes + (lane / 16 * 8 + lane % 8) * 32 + ((p / 8 ^ lane / 4) % 2 << 4);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Config::kTileOc / 8; j += 2) {
      uint32_t raw[4];
      if constexpr (Config::kChannelsLast) {
        char const* const address = x + j / 8 * L::kXBlockBytes + (offset ^ j % 8 << 4);
        cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(address), raw[0], raw[1], raw[2], raw[3]);
      } else {
        char const* const address = x + j * 8 * 32 + offset;
        cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<cute::uint128_t const*>(address), raw[0], raw[1], raw[2], raw[3]);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < 4; ++m) {
        auto const& pair = reinterpret_cast<cutlass::Array<Element, 2> const&>(raw[m]);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) acc[4 * (j + m / 2) + 2 * (m % 2) + i] = float(pair[i]);
      }
    }
  }

  /// Activated, in place of the rows that they came from: the A operand of the second GEMM.
  CUTLASS_DEVICE static void store_operand(char* rows, typename Depthwise::Value const& value, int warp, int lane) {
    // Matrix m of a store: channel k + m / 2, 64 positions m % 2; its row r is a unit of 8 positions.
    uint32_t const offset = R::offset(8 * warp + lane / 16, lane / 8 % 2 * 8 + lane % 8);
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < 8; k += 2) {
      uint32_t packed[4];
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < 4; ++m) {
        float const(&v)[4] = value[k + m / 2];
        packed[m] = pack_pair<Element>(Config::MidActivation::apply(v[m % 2 * 2]), Config::MidActivation::apply(v[m % 2 * 2 + 1]));
      }
      cute::SM90_U32x4_STSM_N::copy(packed[0], packed[1], packed[2], packed[3], *reinterpret_cast<cute::uint128_t*>(rows + k * 128 + (offset ^ k << 4)));
    }
  }

  /// Sums, with bias, to y. `q`: the warp's first position.
  CUTLASS_DEVICE static void store(Arguments const& args, Accumulator const& acc, int n, int q, int lane) {
    int const g = lane / 4, t = lane % 4;
    auto* const y = static_cast<Element*>(args.y);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Config::kTileOc / 8; ++j) {
      float bias[2] = {};
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        int const o = 8 * j + 2 * t + i;
        if (Config::kPwBias && o < Config::kO) bias[i] = float(static_cast<Element const*>(args.pw_bias)[o]);
      }
      uint32_t pair[2];  // output channels 2t, 2t + 1 of positions g, g + 8
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) pair[h] = pack_pair<Element>(acc[4 * j + 2 * h] + bias[0], acc[4 * j + 2 * h + 1] + bias[1]);
      if constexpr (Config::kChannelsLast) {
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h)
          if (q + g + 8 * h < args.w && 8 * j + 2 * t < Config::kO)
            *reinterpret_cast<uint32_t*>(y + (int64_t(n) * args.w + q + g + 8 * h) * Config::kO + 8 * j + 2 * t) = pair[h];
      } else {
        // Transposed, lane (g, t) has output channel g and positions 2t, 2t + 1 of each half; lanes t and t ^ 1 then exchange halves, so that
        // each has 4 adjacent positions.
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h) {
          uint32_t const source = pair[h];
          cute::SM75_U32x1_MOVM_T::copy(source, pair[h]);
        }
        uint32_t const got = __shfl_xor_sync(0xffffffffu, t % 2 ? pair[0] : pair[1], 1);
        uint2 const four = t % 2 ? make_uint2(got, pair[1]) : make_uint2(pair[0], got);
        int const o = 8 * j + g, position = q + t % 2 * 8 + t / 2 * 4;
        if (o < Config::kO && position < args.w)
          *reinterpret_cast<uint2*>(y + (int64_t(n) * Config::kO + o) * args.w + position) = four;
      }
    }
  }

  CUTLASS_DEVICE static void run(Arguments const& args, BlockShared<Config> const& shared, int warpgroup) {
    int const warp = 4 * warpgroup + cutlass::canonical_warp_idx_sync() % 4, lane = cutlass::canonical_lane_idx();
    int const first = 16 * warp;  // position of the warp's sums within the tile
    Depthwise const depthwise(warp, lane);
    RingCursor<1> x;
    RingCursor<Config::kProjectSlots> weight;  // of the chunk whose MMAs are issued next
    RingCursor<Config::kHiddenSlots> hidden;

    int const tiles = BlockTile<Config>::count(args);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
      BlockTile<Config> const tile(args, index);
      Accumulator acc;
      if constexpr (Config::kResidual) {
        shared.x_full->wait(x.parity);
        start(acc, shared.x(), args.pad_left + Config::kPhase + first, lane);
        arrive_warp(*shared.x_empty, lane);
        x.advance();
      }
      // Elementwise work of a chunk overlaps the MMAs of the one before. mma.sync would wait for them: it runs while none is in flight.
      typename Depthwise::Value value;
      shared.hidden_full[hidden.slot].wait(hidden.parity);
      depthwise.compute(value, shared.hidden(hidden.slot), shared.taps(hidden.slot), warp);
      int previous_weight = 0, previous_hidden = 0;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int chunk = 0; chunk < L::kChunks; ++chunk) {
        char* const rows = shared.hidden(hidden.slot);
        store_operand(rows, value, warp, lane);
        cutlass::arch::fence_view_async_shared();
        cute::warpgroup_wait<0>();
        if (chunk > 0) {
          arrive_warp(shared.project_empty[previous_weight], lane);
          arrive_warp(shared.hidden_empty[previous_hidden], lane);
        }
        previous_hidden = hidden.slot;
        hidden.advance();
        if (chunk + 1 < L::kChunks) {
          shared.hidden_full[hidden.slot].wait(hidden.parity);
          depthwise.compute(value, shared.hidden(hidden.slot), shared.taps(hidden.slot), warp);
        }
        shared.project_full[weight.slot].wait(weight.parity);
        cutlass::arch::NamedBarrier::sync(L::kProjectThreads, 0);  // everybody's rows are there
        issue(acc, rows + warpgroup * R::kBlockBytes, shared.project(weight.slot), Config::kResidual || chunk > 0);
        previous_weight = weight.slot;
        weight.advance();
      }
      cute::warpgroup_wait<0>();
      arrive_warp(shared.project_empty[previous_weight], lane);
      arrive_warp(shared.hidden_empty[previous_hidden], lane);

      // A hidden value that is not finite, or not in its 16-bit type, leaves no sum of its position finite.
      int const q = tile.l + first;
      bool const finite = fabsf(acc[0]) < __int_as_float(0x7f800000) && fabsf(acc[2]) < __int_as_float(0x7f800000);
      if (__all_sync(0xffffffffu, finite)) {
        store(args, acc, tile.n, q, lane);
      } else {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int i = 0; i < 16 && q + i < args.w; ++i) exact_block_pixel<Config>(args, tile.n, 0, Config::kO, q + i, lane);
      }
    }
  }
};

template <class Config>
CUTLASS_DEVICE void block1d_sm90(Arguments const& args, cute::TmaDescriptor const& x_map, cute::TmaDescriptor const& expand_map,
                                 cute::TmaDescriptor const& project_map, char* raw) {
  using L = BlockLayout<Config>;
  BlockShared<Config> const shared(raw);
  int const warpgroup = cutlass::canonical_warp_group_idx();
  if (threadIdx.x == 0) {
    shared.initialise();
    cute::prefetch_tma_descriptor(&x_map);
    cute::prefetch_tma_descriptor(&expand_map);
    cute::prefetch_tma_descriptor(&project_map);
  }
  shared.clear_tails();
  __syncthreads();
  if (warpgroup == L::kProjectWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<L::kExpandRegisters>();
    Expand<Config>::run(args, shared);
  } else if (warpgroup > L::kProjectWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<L::kProducerRegisters>();
    int const thread = threadIdx.x - 128 * (L::kProjectWarpgroups + 1);
    if (thread == 0) produce_expand<Config>(args, x_map, expand_map, shared);
    else if (thread == 32) produce_project<Config>(args, project_map, shared);
    else if (thread == 64) produce_taps<Config>(args, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<L::kProjectRegisters>();
    Project<Config>::run(args, shared, warpgroup);
  }
}

}  // namespace cutlass_sep

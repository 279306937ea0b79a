// The pointwise convolution alone, 16 bit, channels_last: a GEMM over all pixels, with both operands in shared memory.
//
// A pair of blocks (a cluster) has a tile of output channels, and each block its own tile of pixels, 64 a warpgroup. A block's producer brings the
// pixels of its own tile, 64 channels at a time, and half of the weights to both blocks of the pair. Sums leave through Sm90Epilogue, to which the
// map is one row of all pixels.
#pragma once

namespace cutlass_sep {

template <class Config>
struct PointwiseLayout {
  using L = Sm90Layout<Config>;
  static_assert(Config::kChannelsLast && !Config::kDepthwise && sizeof(typename Config::Element) == 2 && Config::kSlotChannels == 64);
  static_assert(Config::kBlocks == 1 && Config::kWarpsQ == 4 && Config::kTileOc % 16 == 0);
  static constexpr int kPair = 2;  // blocks
  static constexpr int kPixels = L::kItemQ, kStages = Config::kRowSlots;
  static_assert(kStages > 1);  // a stage is given back when the next has been issued
  static constexpr int kStepChannels = 64, kSteps = ceil_div(Config::kC, kStepChannels);
  /// A stage: pixels, then weights, in rows of 64 channels.
  static constexpr int kPixelBytes = kPixels * 128, kWeightBytes = Config::kTileOc * 128, kStageBytes = kPixelBytes + kWeightBytes;
  static constexpr int kStagingOffset = kStages * kStageBytes;
  static constexpr int kBarrierOffset = kStagingOffset + L::kStagingBytes;
  static constexpr int kSharedBytes = kBarrierOffset + 2 * kStages * 8;
};

/// A pair's tiles: `index` of count().
template <class Config>
struct PointwiseTiles {
  using P = PointwiseLayout<Config>;
  int oc, pixel;  // first output channel; first pixel of this block

  CUTLASS_DEVICE static int count(Arguments const& args) { return ceil_div(args.q, P::kPair * P::kPixels) * P::L::G::kOcTiles; }
  CUTLASS_DEVICE PointwiseTiles(int index, int rank)
      : oc(index % P::L::G::kOcTiles * Config::kTileOc), pixel((index / P::L::G::kOcTiles * P::kPair + rank) * P::kPixels) {}
};

template <class Config>
struct PointwiseShared {
  using P = PointwiseLayout<Config>;
  char* base;
  FullBarrier* full;
  EmptyBarrier* empty;  // in both blocks: the pair's weights are written to both

  CUTLASS_DEVICE explicit PointwiseShared(char* raw)
      : base(raw), full(reinterpret_cast<FullBarrier*>(raw + P::kBarrierOffset)), empty(reinterpret_cast<EmptyBarrier*>(full + P::kStages)) {}
  CUTLASS_DEVICE char* pixels(int slot) const { return base + slot * P::kStageBytes; }
  CUTLASS_DEVICE char* weights(int slot) const { return pixels(slot) + P::kPixelBytes; }
  CUTLASS_DEVICE void initialise() const {
    for (int i = 0; i < P::kStages; ++i) {
      full[i].init(1);
      empty[i].init(P::kPair * 4 * Config::kWarpgroups);
    }
    cutlass::arch::fence_barrier_init();
  }
};

template <class Config>
CUTLASS_DEVICE void produce_tiles(Arguments const& args, cute::TmaDescriptor const& x_map, cute::TmaDescriptor const& weight_map,
                                  PointwiseShared<Config> const& shared, int rank) {
  using P = PointwiseLayout<Config>;
  using Tiles = PointwiseTiles<Config>;
  constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr int kHalf = Config::kTileOc / P::kPair;
  int const tiles = Tiles::count(args), first = blockIdx.x / P::kPair;
  auto const barrier = [&](int slot) { return reinterpret_cast<uint64_t*>(&shared.full[slot]); };
  auto const load_weights = [&](Tiles const& tile, int step, RingCursor<P::kStages> const& ring) {
    shared.empty[ring.slot].wait(ring.parity ^ 1);
    shared.full[ring.slot].arrive_and_expect_tx(P::kStageBytes);
    cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&weight_map, barrier(ring.slot), (1 << P::kPair) - 1, kHint,
                                           shared.weights(ring.slot) + rank * kHalf * 128, step * P::kStepChannels, tile.oc + rank * kHalf);
  };
  // The first stages' weights, which no kernel of the call makes.
  constexpr int kEarly = cute::min(P::kStages, P::kSteps);
  RingCursor<P::kStages> early, ring;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int step = 0; step < kEarly && first < tiles; ++step, early.advance()) load_weights(Tiles(first, rank), step, early);
  await_grid_before();
  admit_next_grid();
  CUTLASS_PRAGMA_NO_UNROLL
  for (int index = first; index < tiles; index += gridDim.x / P::kPair) {
    Tiles const tile(index, rank);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < P::kSteps; ++step, ring.advance()) {
      if (index > first || step >= kEarly) load_weights(tile, step, ring);
      cute::SM90_TMA_LOAD_2D::copy(&x_map, barrier(ring.slot), kHint, shared.pixels(ring.slot), step * P::kStepChannels, tile.pixel);
    }
  }
  // The other block arrives at these barriers, and has nowhere to once this one has ended.
  for (int i = 0; i < P::kStages; ++i, ring.advance()) shared.empty[ring.slot].wait(ring.parity ^ 1);
}

/// acc [64 pixels][kTileOc] (+)= pixels x weights of a stage, issued and committed.
template <class Config>
struct StageProduct {
  using P = PointwiseLayout<Config>;
  static constexpr int kSums = Config::kTileOc / 2;

  template <int... I>
  CUTLASS_DEVICE static void fma(uint64_t a, uint64_t b, float (&c)[kSums], bool accumulate, cute::integer_sequence<int, I...>) {
    Config::MmaAtom::fma(a, b, c[I]..., accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }
  CUTLASS_DEVICE static void issue(float (&acc)[kSums], char const* pixels, char const* weights, bool accumulate) {
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < P::kStepChannels / 16; ++k)  // channels past the end are zero; a branch would have ptxas serialise the MMAs (C7519)
      fma(k_major_descriptor(pixels, 32 * k), k_major_descriptor(weights, 32 * k), acc, accumulate || k > 0, cute::make_int_sequence<kSums>{});
    cute::warpgroup_commit_batch();
  }
  /// Nothing that reads or writes sums moves over this point.
  CUTLASS_DEVICE static void fence(float (&acc)[kSums]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSums; ++i) cute::warpgroup_fence_operand(acc[i]);
  }
};

template <class Config>
CUTLASS_DEVICE void multiply_tiles(Arguments const& args, cute::TmaDescriptor const& y_map, PointwiseShared<Config> const& shared, int warpgroup,
                                   int rank) {
  using P = PointwiseLayout<Config>;
  using Product = StageProduct<Config>;
  using Epilogue = Sm90Epilogue<Config>;
  int const warp = cutlass::canonical_warp_idx_sync() % 4, lane = cutlass::canonical_lane_idx();
  char* const staging = shared.base + P::kStagingOffset + (4 * warpgroup + warp) * P::L::kStagingWarpBytes;
  RingCursor<P::kStages> ring;
  auto const release = [&](int slot) { shared.empty[slot].arrive(lane, lane < P::kPair); };
  int const tiles = PointwiseTiles<Config>::count(args);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int index = blockIdx.x / P::kPair; index < tiles; index += gridDim.x / P::kPair) {
    PointwiseTiles<Config> const tile(index, rank);
    typename Epilogue::Accumulator acc;
    int before = 0;  // slot of the step before
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < P::kSteps; ++step) {
      shared.full[ring.slot].wait(ring.parity);
      Product::fence(acc[0]);
      Product::issue(acc[0], shared.pixels(ring.slot) + warpgroup * 64 * 128, shared.weights(ring.slot), step > 0);
      Product::fence(acc[0]);
      cute::warpgroup_wait<1>();  // what the step before reads has been read
      if (step > 0) release(before);
      before = ring.slot;
      ring.advance();
    }
    cute::warpgroup_wait<0>();
    Product::fence(acc[0]);
    release(before);
    int const pixel = tile.pixel + warpgroup * 64 + warp * 16;
    Epilogue::apply(args, acc, PixelScale<Config>{}, 0, tile.oc, 0, pixel, lane);
    Epilogue::store(y_map, acc, staging, 0, tile.oc, 0, pixel, lane);
  }
  if (lane == 0) cute::tma_store_wait<0>();
}

template <class Config>
CUTLASS_DEVICE void pointwise_sm90(Arguments const& args, cute::TmaDescriptor const& x_map, cute::TmaDescriptor const& y_map,
                                   cute::TmaDescriptor const& weight_map, char* raw) {
  using L = Sm90Layout<Config>;
  PointwiseShared<Config> const shared(raw);
  int const warpgroup = cutlass::canonical_warp_group_idx(), rank = int(cute::block_rank_in_cluster());
  if (threadIdx.x == 0) {
    shared.initialise();
    cute::prefetch_tma_descriptor(&x_map);
    cute::prefetch_tma_descriptor(&y_map);
    cute::prefetch_tma_descriptor(&weight_map);
  }
  cute::cluster_arrive_relaxed();  // barrier_init's fence is of the cluster
  cute::cluster_wait();
  __syncthreads();
  if (warpgroup == Config::kWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<L::kProducerRegisters>();
    if (threadIdx.x == 128 * Config::kWarpgroups) produce_tiles<Config>(args, x_map, weight_map, shared, rank);
  } else {
    cutlass::arch::warpgroup_reg_alloc<L::kConsumerRegisters>();
    multiply_tiles<Config>(args, y_map, shared, warpgroup, rank);
  }
}

}  // namespace cutlass_sep

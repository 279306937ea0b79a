// The packing launch of the fused fp32 block on a CPU: templates/half_operands.cuh as it is, with what it takes of CUDA and CUTLASS in plain C++.
// The threads of a block take turns on one thread of the CPU, from one collective to the next.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <ucontext.h>
#include <vector>

#define CUTLASS_DEVICE inline
#define CUTLASS_HOST_DEVICE inline
#define CUTLASS_PRAGMA_UNROLL
#define CUTLASS_PRAGMA_NO_UNROLL
#define __shared__ static  // one block at a time

using std::max;
using std::min;

template <class To, class From>
To bits_of(From from) {
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline uint32_t __float_as_uint(float x) { return bits_of<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return bits_of<float>(x); }
inline float __int_as_float(int x) { return bits_of<float>(x); }

struct __half2 {
  _Float16 x, y;
};
inline __half2 __floats2half2_rn(float x, float y) { return {_Float16(x), _Float16(y)}; }
inline float __low2float(__half2 pair) { return pair.x; }
inline float __high2float(__half2 pair) { return pair.y; }

struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
struct uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace cutlass {
using half_t = _Float16;
template <class Element, int N>
struct Array {
  Element data[N];
  Element& operator[](int i) { return data[i]; }
  Element const& operator[](int i) const { return data[i]; }
};
template <class Element, int N>
struct alignas(sizeof(Element) * N) AlignedArray : Array<Element, N> {};
template <class To, class From, int N>
struct NumericArrayConverter {
  Array<To, N> operator()(Array<From, N> const& from) const {
    Array<To, N> to;
    for (int i = 0; i < N; ++i) to[i] = To(from[i]);
    return to;
  }
};
}  // namespace cutlass

namespace cute {
using uint128_t = uint4;
template <bool Choice, class A, class B>
using conditional_t = std::conditional_t<Choice, A, B>;
template <class A, class B>
constexpr bool is_same_v = std::is_same_v<A, B>;
struct SM75_U32x4_LDSM_N {  // of the main kernel
  static void copy(uint128_t const&, uint32_t&, uint32_t&, uint32_t&, uint32_t&) {}
};
}  // namespace cute

// ---- A block's threads

constexpr int kThreads = 256, kStackBytes = 1 << 16;
struct Index {
  unsigned x;
} threadIdx;
ucontext_t scheduler, contexts[kThreads];
char stacks[kThreads][kStackBytes];
bool ended[kThreads];

void yield() {
  unsigned const self = threadIdx.x;
  swapcontext(&contexts[self], &scheduler);
}

/// Threads that meet as often as each other; one may be at the next meeting while others still read what was said at this one.
struct Meeting {
  int size;
  long arrived = 0;
  float said[2][kThreads];
  long attended[kThreads] = {};

  /// What `from` says.
  float exchange(float mine, int self, int from) {
    long const turn = attended[self]++;
    said[turn % 2][self] = mine;
    ++arrived;
    while (arrived < size * (turn + 1)) yield();
    return said[turn % 2][from];
  }
};
Meeting block_meeting{kThreads}, warp_meetings[kThreads / 32];

inline void __syncthreads() { block_meeting.exchange(0.f, threadIdx.x, 0); }
inline void __syncwarp() { warp_meetings[threadIdx.x / 32].exchange(0.f, threadIdx.x % 32, 0); }
inline float __shfl_xor_sync(unsigned, float value, int mask) {
  int const lane = threadIdx.x % 32;
  return warp_meetings[threadIdx.x / 32].exchange(value, lane, lane ^ mask);
}

// ---- The templates

namespace cutlass_sep {
template <class Activation, int N>
void activate(float (&)[N]);  // of the main kernel
}  // namespace cutlass_sep

#include "problem.cuh"
#include "numeric.cuh"
#include "toeplitz_depthwise.cuh"
#include "fp32_depthwise.cuh"
#include "half_operands.cuh"

struct Config {
  using Element = float;
  using Operand = cutlass::half_t;
#include "constants.inc"
};

cutlass_sep::Arguments const* arguments;
int of_block;

void run_thread() {
  cutlass_sep::HalfOperands<Config>::pack(*arguments, of_block);
  ended[threadIdx.x] = true;
}

int misaligned;
extern "C" void __ubsan_handle_type_mismatch_v1(void*, void*) { ++misaligned; }  // what -fsanitize=alignment calls

/// Runs all blocks; returns how many accesses were not aligned.
extern "C" int pack(cutlass_sep::Arguments const* args, int blocks) {
  arguments = args, misaligned = 0;
  for (of_block = 0; of_block < blocks; ++of_block) {
    block_meeting = {kThreads};
    for (auto& meeting : warp_meetings) meeting = {32};
    for (int i = 0; i < kThreads; ++i) {
      ended[i] = false;
      getcontext(&contexts[i]);
      contexts[i].uc_stack.ss_sp = stacks[i], contexts[i].uc_stack.ss_size = kStackBytes, contexts[i].uc_link = &scheduler;
      makecontext(&contexts[i], run_thread, 0);
    }
    while (!std::all_of(ended, ended + kThreads, [](bool end) { return end; }))
      for (unsigned i = 0; i < kThreads; ++i)
        if (!ended[i]) {
          threadIdx.x = i;
          swapcontext(&scheduler, &contexts[i]);
        }
  }
  return misaligned;
}

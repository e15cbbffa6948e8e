// What a CUDA kernel needs of a GPU, on a CPU: the threads of one block are fibers that take turns, blocks follow each
// other. Copies to shared memory happen as early as they are asked for, or as late as they are waited for.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

typedef unsigned int u32;
using std::max;
using std::min;

struct float2 { float x, y; };
struct uint4 { u32 x, y, z, w; };
struct dim { int x = 0, y = 0, z = 0; };
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float rsqrtf(float x) { return 1 / std::sqrt(x); }
#define __expf std::exp

#define __device__
#define __forceinline__
#define __global__
#define __launch_bounds__(...)

alignas(128) static char rings[256 << 10];
static dim threadIdx, blockIdx;
static bool late;
static void (*publish)();  // what the kernel in front does last

struct Copy { u32 target; const char* source; bool held; };
struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[256 << 10]};
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
    bool done = false;
};
struct Barrier { int arrived = 0, generation = 0; };

constexpr int ALL = WARPS * 32;
static Fiber fibers[ALL];
static ucontext_t scheduler;
static Barrier block_barrier, warp_barriers[WARPS];
static u32 exchanged[ALL][6];

static Fiber& self() { return fibers[threadIdx.x]; }

static void meet(Barrier& barrier, int size) {
    const int generation = barrier.generation;
    if (++barrier.arrived == size) {
        barrier.arrived = 0;
        barrier.generation++;
    }
    while (barrier.generation == generation) swapcontext(&self().context, &scheduler);
}
static void __syncthreads() { meet(block_barrier, ALL); }
static void __syncwarp() { meet(warp_barriers[threadIdx.x / 32], 32); }

static u32 shared_address(const void* pointer) { return static_cast<const char*>(pointer) - rings; }
static void run(const Copy& copy) {
    if (copy.held) std::memcpy(rings + copy.target, copy.source, 16);
    else std::memset(rings + copy.target, 0, 16);
}
static void copy16(u32 target, const char* source, bool held) {
    if (late) self().open.push_back({target, source, held});
    else run({target, source, held});
}
static unsigned long long read_once() { return 0; }
static void copy16(u32 target, const char* source, unsigned long long) { copy16(target, source, true); }
static void commit() { self().groups.push_back(std::move(self().open)), self().open.clear(); }
template <int PENDING>
static void wait() {
    auto& groups = self().groups;
    while (groups.size() > PENDING) {
        for (const Copy& copy : groups.front()) run(copy);
        groups.erase(groups.begin());
    }
}
static void let_next_start() {}
static void wait_for_kernel_in_front() {
    __syncthreads();
    if (threadIdx.x == 0) publish();
    __syncthreads();
}

static float widened(std::uint16_t bits) {
    float value;
#if BF16
    const u32 wide = static_cast<u32>(bits) << 16;
    std::memcpy(&value, &wide, 4);
#else
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    value = half;
#endif
    return value;
}
static unsigned short rounded(float x) {
    std::uint16_t bits;
#if BF16
    u32 wide;
    std::memcpy(&wide, &x, 4);
    bits = x != x ? 0x7fc0 : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
#else
    const _Float16 half = x;
    std::memcpy(&bits, &half, 2);
#endif
    return bits;
}
static float2 unpack(u32 packed) { return {widened(packed & 0xffff), widened(packed >> 16)}; }
static u32 multiply_pair(u32 a, u32 b) {
    const float2 left = unpack(a), right = unpack(b);
    return rounded(left.x * right.x) | static_cast<u32>(rounded(left.y * right.y)) << 16;
}

static float element(const char* from, long long index) {
    return unpack(reinterpret_cast<const unsigned short*>(from)[index]).x;
}

static void store(char* to, long long index, float value) {
    reinterpret_cast<unsigned short*>(to)[index] = rounded(value);
}

// The lanes' shares of A (16 x 16), B (16 x 8) and C (16 x 8), as the PTX manual has them for m16n8k16.
static void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
    std::memcpy(exchanged[threadIdx.x], mine, sizeof mine);
    __syncwarp();
    const int warp = threadIdx.x / 32 * 32, group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    for (int index = 0; index < 4; index++) {
        const int row = group + index / 2 * 8, column = pair * 2 + index % 2;
        float sum = c[index];
        for (int k = 0; k < 16; k++) {
            const u32* left = exchanged[warp + row % 8 * 4 + k % 8 / 2];
            const u32* right = exchanged[warp + column * 4 + k % 8 / 2];
            const float2 a = unpack(left[row / 8 + k / 8 * 2]), b = unpack(right[4 + k / 8]);
            sum += k % 2 ? a.y * b.y : a.x * b.x;
        }
        c[index] = sum;
    }
    __syncwarp();
}

#include "kernel.inc"

static const Params* params;
static char* hidden_at;
static std::vector<char> hidden;

static void start() {
    project(*params);
    self().done = true;
    swapcontext(&self().context, &scheduler);
}

// The `size` bytes at `at` are the work of the kernel in front: NaN until the wait. Returns whether all threads ended.
extern "C" bool launch(const Params* given, int x, int y, bool copies_late, char* at, std::size_t size) {
    params = given, late = copies_late, hidden_at = at;
    hidden.assign(at, at + size);
    std::memset(at, 0xff, size);
    publish = [] { std::copy(hidden.begin(), hidden.end(), hidden_at), hidden.clear(); };
    for (blockIdx.y = 0; blockIdx.y < y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < x; blockIdx.x++) {
            std::memset(rings, 0xff, sizeof rings);  // NaN
            for (threadIdx.x = 0; threadIdx.x < ALL; threadIdx.x++) {
                Fiber& fiber = self();
                fiber.groups.clear(), fiber.open.clear(), fiber.done = false;
                getcontext(&fiber.context);
                fiber.context.uc_stack.ss_sp = fiber.stack.get();
                fiber.context.uc_stack.ss_size = 256 << 10;
                fiber.context.uc_link = &scheduler;
                makecontext(&fiber.context, start, 0);
            }
            for (int turn = 0, left = ALL; left; turn++) {
                if (turn > 100000) return false;
                for (int thread = 0; thread < ALL; thread++) {
                    threadIdx.x = thread;
                    if (self().done) continue;
                    swapcontext(&scheduler, &self().context);
                    left -= self().done;
                }
            }
        }
    return true;
}

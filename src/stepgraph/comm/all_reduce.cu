// All-reduces of one node over memory that every rank can address: see symmetric.py.
//
// Sums are made in the order of the ranks and in float, so that all ranks get the same bits. A wait has a limit in
// time: a rank that is gone would otherwise leave the device spinning, which no watchdog sees inside a graph.
//
// Compiled with WORLD, KIND (0 float, 1 bfloat16, 2 float16) and OVERLAP (programmatic dependent launch) defined.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Params {
    uint4* input;                  // 16-byte aligned
    uint4* output;                 // may be the input, where a kernel says so
    const uint4* residual;         // added to the sum; or null
    const u64* row;                // pull: the address of every rank's contribution
    u64 workspace[8];              // of every rank
    u32* turns;                    // own: calls that each block has taken part in
    u32* failed;                   // own: a wait has run out of time
    u32* told;                     // the host's: 1 + the rank that was waited for
    u64 signals, slots, slot_bytes;  // where they lie in a workspace
    u64 limit_ns;
    u32 vectors, rank;             // of 16 bytes
};

__device__ __forceinline__ void wait_for_kernel_in_front() {
#if OVERLAP
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_in() {
#if OVERLAP
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ u64 now_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Between ranks: every element is whole, but nothing orders them.
__device__ __forceinline__ uint4 load_vector(const uint4* source) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(source));
    return v;
}

__device__ __forceinline__ void store_vector(uint4* target, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(target), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}

__device__ __forceinline__ u32 load_acquire(const u32* source) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(u32* target, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(target), "r"(value) : "memory");
}

// A wait's clock. It is looked at rarely, since what is waited for mostly comes at once.
struct Patience {
    u64 since = 0;
    u32 polls = 0;

    __device__ __forceinline__ bool lost(const Params& p, u32 peer) {
        if (++polls & 1023) return false;
        if (*static_cast<volatile u32*>(p.failed)) return true;  // one wait that ran out is enough
        const u64 now = now_ns();
        if (!since) since = now;
        if (now - since < p.limit_ns) return false;
        *static_cast<volatile u32*>(p.told) = 1 + peer;
        __threadfence_system();
        *static_cast<volatile u32*>(p.failed) = 1;
        return true;
    }
};

#if KIND == 0
constexpr int LANES = 4;
#else
constexpr int LANES = 8;
#endif

__device__ __forceinline__ void add_to(float (&sum)[LANES], uint4 v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if KIND == 0
        sum[i] += __uint_as_float(words[i]);
#elif KIND == 1
        sum[2 * i] += __uint_as_float(words[i] << 16);
        sum[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
#else
        float low, high;
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(words[i]));
        sum[2 * i] += low;
        sum[2 * i + 1] += high;
#endif
    }
}

__device__ __forceinline__ uint4 packed(const float (&sum)[LANES]) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if KIND == 0
        words[i] = __float_as_uint(sum[i]);
#elif KIND == 1
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(sum[2 * i + 1]), "f"(sum[2 * i]));
#else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(sum[2 * i + 1]), "f"(sum[2 * i]));
#endif
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ uint4* at(u64 base, u64 offset, u32 vector) {
    return reinterpret_cast<uint4*>(base + offset) + vector;
}

// ---------------------------------------------------------------------------------------------------------------------
// One-shot push: each rank writes its vector into a slot at every peer, and polls its own slots. The data are the flag:
// a word of +0.0 has not come yet, and a real +0.0 is sent as -0.0, which sums to the same. Two sets of slots take turns:
// a rank sends call k + 2 only after it has every peer's call k + 1, which the peer sent after it had read, and wiped,
// call k. Blocks count calls, so the grid is the same at every size. The output may be the input.

__device__ __forceinline__ u32 without_zero(u32 word) {
#if KIND == 0
    return word ? word : 0x80000000u;
#else
    if (!(word & 0xffffu)) word |= 0x8000u;
    if (!(word >> 16)) word |= 0x80000000u;
    return word;
#endif
}

__device__ __forceinline__ uint4 without_zeros(uint4 v) {
    return make_uint4(without_zero(v.x), without_zero(v.y), without_zero(v.z), without_zero(v.w));
}

extern "C" __global__ void one_shot_push(const Params p) {
    let_next_kernel_in();  // it may read weights meanwhile, and waits for the sum
    wait_for_kernel_in_front();
    const u32 turn = p.turns[blockIdx.x], first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    const u64 slots = p.slots + (turn & 1) * WORLD * p.slot_bytes;
    for (u32 i = first; i < p.vectors; i += step) {
        const uint4 mine = without_zeros(p.input[i]);
#pragma unroll
        for (u32 hop = 1; hop < WORLD; hop++) {
            const u32 peer = (p.rank + hop) % WORLD;  // not all to the same one at once
            store_vector(at(p.workspace[peer], slots + p.rank * p.slot_bytes, i), mine);
        }
    }
    for (u32 i = first; i < p.vectors; i += step) {
        float sum[LANES] = {};
#pragma unroll
        for (u32 peer = 0; peer < WORLD; peer++) {
            if (peer == p.rank) {
                add_to(sum, without_zeros(p.input[i]));
                continue;
            }
            uint4* slot = at(p.workspace[p.rank], slots + peer * p.slot_bytes, i);
            uint4 v = load_vector(slot);
            Patience patience;
            while (!(v.x && v.y && v.z && v.w)) {
                if (patience.lost(p, peer)) break;
                v = load_vector(slot);
            }
            store_vector(slot, make_uint4(0, 0, 0, 0));
            add_to(sum, v);
        }
        if (p.residual) add_to(sum, p.residual[i]);
        p.output[i] = packed(sum);
    }
    __syncthreads();  // all have read the turn
    if (threadIdx.x == 0) p.turns[blockIdx.x] = turn + 1;
}

// ---------------------------------------------------------------------------------------------------------------------
// Gather of a few words, pushed the same way. A word may be anything, so it travels with the number of the call beside
// it, in one store of 8 bytes, and nothing need be wiped. `vectors` counts words here; output: [WORLD][words].

__device__ __forceinline__ u64 load_pair(const u64* source) {
    u64 pair;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(pair) : "l"(source));
    return pair;
}

__device__ __forceinline__ void store_pair(u64* target, u64 pair) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(target), "l"(pair));
}

__device__ __forceinline__ u64* pair_at(const Params& p, u32 owner, u32 turn, u32 from, u32 word) {
    return reinterpret_cast<u64*>(p.workspace[owner] + p.slots + ((turn & 1) * WORLD + from) * p.slot_bytes) + word;
}

extern "C" __global__ void small_gather(const Params p) {
    let_next_kernel_in();
    wait_for_kernel_in_front();
    const u32* input = reinterpret_cast<const u32*>(p.input);
    u32* output = reinterpret_cast<u32*>(p.output);
    const u32 turn = p.turns[blockIdx.x], first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    const u32 call = turn + 1;
    for (u32 i = first; i < p.vectors; i += step) {
        const u64 pair = static_cast<u64>(call) << 32 | input[i];
#pragma unroll
        for (u32 hop = 1; hop < WORLD; hop++) {
            const u32 peer = (p.rank + hop) % WORLD;
            store_pair(pair_at(p, peer, turn, p.rank, i), pair);
        }
    }
    for (u32 i = first; i < p.vectors; i += step) {
#pragma unroll
        for (u32 peer = 0; peer < WORLD; peer++) {
            u64 pair = input[i];
            if (peer != p.rank) {
                const u64* slot = pair_at(p, p.rank, turn, peer, i);
                pair = load_pair(slot);
                Patience patience;
                while (static_cast<u32>(pair >> 32) != call) {
                    if (patience.lost(p, peer)) break;
                    pair = load_pair(slot);
                }
            }
            output[peer * p.vectors + i] = static_cast<u32>(pair);
        }
    }
    __syncthreads();  // all have read the turn
    if (threadIdx.x == 0) p.turns[blockIdx.x] = call;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pull: peers read a contribution where it lies, between two barriers of the blocks with one number. The first says that
// the kernel in front has ended everywhere, so that what it wrote is there; the second that nobody reads any more.

__device__ __forceinline__ u32* signal(const Params& p, u32 owner, u32 which, u32 from) {
    return reinterpret_cast<u32*>(p.workspace[owner] + p.signals) + (blockIdx.x * 2 + which) * WORLD + from;
}

__device__ __forceinline__ void meet(const Params& p, u32 which, u32 turn) {
    __syncthreads();  // what the block has read and written is behind the release below
    if (threadIdx.x < WORLD && threadIdx.x != p.rank) {
        const u32 peer = threadIdx.x;
        store_release(signal(p, peer, which, p.rank), turn);
        const u32* mine = signal(p, p.rank, which, peer);
        Patience patience;
        while (static_cast<int>(load_acquire(mine) - turn) < 0) {
            if (patience.lost(p, peer)) break;
        }
    }
    __syncthreads();
}

__device__ __forceinline__ uint4 sum_of(const Params& p, u32 i) {
    uint4 parts[WORLD];
#pragma unroll
    for (u32 peer = 0; peer < WORLD; peer++) parts[peer] = load_vector(at(p.row[peer], 0, i));
    float sum[LANES] = {};
#pragma unroll
    for (u32 peer = 0; peer < WORLD; peer++) add_to(sum, parts[peer]);
    if (p.residual) add_to(sum, p.residual[i]);
    return packed(sum);
}

// The output is not the input, which peers still read.
extern "C" __global__ void one_shot_pull(const Params p) {
    let_next_kernel_in();  // it may read weights meanwhile, and waits for the sum
    wait_for_kernel_in_front();
    const u32 turn = p.turns[blockIdx.x] + 1;
    meet(p, 0, turn);
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < p.vectors; i += gridDim.x * blockDim.x) p.output[i] = sum_of(p, i);
    meet(p, 1, turn);
    if (threadIdx.x == 0) p.turns[blockIdx.x] = turn;
}

// Each rank sums its share of the elements and writes the sum over every rank's contribution: in place. Nobody else
// reads or writes that share, so no barrier is needed between.
extern "C" __global__ void two_shot_pull(const Params p) {
    let_next_kernel_in();  // it may read weights meanwhile, and waits for the sum
    wait_for_kernel_in_front();
    const u32 turn = p.turns[blockIdx.x] + 1;
    const u32 begin = static_cast<u64>(p.vectors) * p.rank / WORLD, end = static_cast<u64>(p.vectors) * (p.rank + 1) / WORLD;
    meet(p, 0, turn);
    for (u32 i = begin + blockIdx.x * blockDim.x + threadIdx.x; i < end; i += gridDim.x * blockDim.x) {
        const uint4 sum = sum_of(p, i);
#pragma unroll
        for (u32 hop = 0; hop < WORLD; hop++) store_vector(at(p.row[(p.rank + hop) % WORLD], 0, i), sum);
    }
    meet(p, 1, turn);
    if (threadIdx.x == 0) p.turns[blockIdx.x] = turn;
}

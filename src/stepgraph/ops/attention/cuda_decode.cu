// Paged decode for small groups of query heads, one kernel: see cuda_decode.py.
//
// A program has one row, one KV head and a part of the row's blocks; each of its warps takes every WARPS-th block and
// streams K and V through a ring of its own in shared memory, so that nothing but the end needs a barrier. Scores are
// computed as K Q^T and the result as V^T P^T on tensor cores: the heads of a group are the narrow side (8), and no
// part of an instruction is spent on rows of padding.
//
// Compiled with HEAD_DIM, GROUP, BF16, PDL, WARPS and RING defined.

constexpr int BLOCK = 16;                      // tokens of a block of the cache
constexpr int ROW = HEAD_DIM * 2;              // bytes of a token's keys or values
constexpr int CHUNKS = HEAD_DIM / 8;           // of 16 bytes in a row
constexpr int HALF = BLOCK * ROW;              // the keys, or the values, of a block
constexpr int STEPS = HEAD_DIM / 16;           // instructions along a head
constexpr int THREADS = WARPS * 32;
constexpr int PITCH = HEAD_DIM + 4;            // floats; keeps the warps' results off each other's banks
constexpr int PARTS = 16;                      // parts that are joined at a time
constexpr float NONE = -1e30f;                  // finite, so that NONE - NONE is 0

static_assert(GROUP <= 8 && CHUNKS >= 8 && GROUP * PITCH * 4 <= RING * HALF, "see cuda_decode.supported");

__device__ __forceinline__ void load_matrices(u32 (&a)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address));
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&a)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address));
}

__device__ __forceinline__ void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    multiply_add(c, a[0], a[1], a[2], a[3], b0, b1);
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 packed;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
    return packed;
}

__device__ __forceinline__ u32 transpose(u32 matrix) {
    u32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
    return out;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float over_tokens_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}

__device__ __forceinline__ float over_tokens_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 4);
    x += __shfl_xor_sync(~0u, x, 8);
    return x + __shfl_xor_sync(~0u, x, 16);
}

struct Params {
    const char* q;
    const char* kv;
    const int* block_tables;
    const int* seq_lens;
    char* out;
    float* parts;
    float* levels;
    int* arrived;
    long long q_row, q_head, kv_block, kv_half, kv_token, kv_head, table_row, out_row, out_head;  // bytes; tables: ints
    float scale_log2;
    int splits, window, min_blocks;
};

// One warp's copy of the keys or values of a block, without waiting for it.
__device__ __forceinline__ void load_half(u32 target, const char* source, long long kv_token, int first_token, int begin,
                                          int length, int lane) {
#pragma unroll
    for (int piece = 0; piece < HALF / 512; piece++) {
        const int index = piece * 32 + lane, token = index / CHUNKS, chunk = index % CHUNKS;
        const bool held = first_token + token >= begin && first_token + token < length;
        copy16(target + token * ROW + ((chunk ^ (token & 7)) << 4), source + token * kv_token + chunk * 16, held);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) paged_decode(const Params p) {
    extern __shared__ __align__(128) char rings[];
    __shared__ float warp_top[WARPS][8], warp_sum[WARPS][8];
#if PDL
    let_next_start();
#endif
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int kv_head = blockIdx.x, split = blockIdx.y, row = blockIdx.z;
    const int heads = gridDim.x * GROUP;
    const int length = max(p.seq_lens[row], 0), begin = max(length - p.window, 0);
    const int first_block = begin / BLOCK, blocks = (length + BLOCK - 1) / BLOCK - first_block;
    const int chunk = max((blocks + p.splits - 1) / p.splits, p.min_blocks);
    const int active = max((blocks + chunk - 1) / chunk, 1);  // a row without tokens is written too
    if (split >= active) {
#if PDL
        wait_for_kernel_in_front();
#endif
        return;
    }
    const int start = first_block + split * chunk, stop = first_block + min((split + 1) * chunk, blocks);
    const int mine = max((stop - start - warp + WARPS - 1) / WARPS, 0);  // this warp's blocks: start + warp + WARPS i
    const int* table = p.block_tables + row * p.table_row + start + warp;
    const char* kv = p.kv + kv_head * p.kv_head;
    const char* ring = rings + warp * RING * HALF;
    const u32 slots = shared_address(ring);

    // Block numbers are held by the lanes, 32 at a time.
    int numbers = lane < mine ? table[lane * WARPS] : 0;
    auto load = [&](int half) {  // half 2 i: keys of the warp's i-th block, 2 i + 1: its values
        const int i = half >> 1;
        if (i < mine) {
            if (i && !(i & 31) && !(half & 1)) numbers = i + lane < mine ? table[(i + lane) * WARPS] : 0;
            const int number = __shfl_sync(~0u, numbers, i & 31);
            const char* source = kv + number * p.kv_block + (half & 1) * p.kv_half;
            load_half(slots + (half % RING) * HALF, source, p.kv_token, (start + warp + i * WARPS) * BLOCK, begin,
                      length, lane);
        }
    };

#if PDL
    auto newest = [&](int half) {  // the block that the kernel in front may still be writing
        return start + warp + (half >> 1) * WARPS == (length - 1) / BLOCK;
    };
    bool again = false;
#pragma unroll
    for (int half = 0; half < RING; half++) {
        if (newest(half)) again = true;
        else load(half);
        commit();
    }
    wait_for_kernel_in_front();
    if (again) {
#pragma unroll
        for (int half = 0; half < RING; half++)
            if (newest(half)) load(half);
        commit();
        wait<0>();
    }
#else
#pragma unroll
    for (int half = 0; half < RING; half++) {
        load(half);
        commit();
    }
#endif

    const int group = lane >> 2, pair = lane & 3;  // of an 8x8 matrix: its row, and its columns 2 pair and 2 pair + 1
    u32 queries[STEPS][2];
    {
        const char* q = p.q + row * p.q_row + (kv_head * GROUP + group) * p.q_head + pair * 4;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            queries[step][0] = group < GROUP ? *reinterpret_cast<const u32*>(q + step * 32) : 0;
            queries[step][1] = group < GROUP ? *reinterpret_cast<const u32*>(q + step * 32 + 16) : 0;
        }
    }

    float top0 = NONE, top1 = NONE, sum0 = 0, sum1 = 0;  // of heads 2 pair and 2 pair + 1
    float result[STEPS][4] = {};
    const int matrix = lane >> 3, line = lane & 7;
    const int key_row = line + (matrix & 1) * 8, value_row = line + (matrix >> 1) * 8;
    for (int i = 0; i < mine; i++) {
        wait<RING - 1>();
        __syncwarp();
        float even[4] = {}, odd[4] = {};
        {
            const u32 keys = slots + (2 * i % RING) * HALF + key_row * ROW;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                u32 a[4];
                load_matrices(a, keys + (((step * 2 + (matrix >> 1)) ^ line) << 4));
                multiply_add(step & 1 ? odd : even, a, queries[step][0], queries[step][1]);
            }
        }
        __syncwarp();
        load(2 * i + RING);
        commit();

        const int token = (start + warp + i * WARPS) * BLOCK + group;
        const bool low = token >= begin && token < length, high = token + 8 >= begin && token + 8 < length;
        const float s0 = low ? (even[0] + odd[0]) * p.scale_log2 : NONE, s1 = low ? (even[1] + odd[1]) * p.scale_log2 : NONE;
        const float s2 = high ? (even[2] + odd[2]) * p.scale_log2 : NONE, s3 = high ? (even[3] + odd[3]) * p.scale_log2 : NONE;
        const float new0 = fmaxf(top0, over_tokens_max(fmaxf(s0, s2))), new1 = fmaxf(top1, over_tokens_max(fmaxf(s1, s3)));
        const float shrink0 = exp2_fast(top0 - new0), shrink1 = exp2_fast(top1 - new1);
        const float w0 = exp2_fast(s0 - new0), w1 = exp2_fast(s1 - new1), w2 = exp2_fast(s2 - new0), w3 = exp2_fast(s3 - new1);
        sum0 = sum0 * shrink0 + w0 + w2;
        sum1 = sum1 * shrink1 + w1 + w3;
        top0 = new0;
        top1 = new1;
        const u32 weights0 = transpose(pack(w0, w1)), weights1 = transpose(pack(w2, w3));

        wait<RING - 1>();
        __syncwarp();
        const u32 values = slots + ((2 * i + 1) % RING) * HALF + value_row * ROW;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            u32 a[4];
            load_matrices_transposed(a, values + (((step * 2 + (matrix & 1)) ^ line) << 4));
            result[step][0] *= shrink0;
            result[step][1] *= shrink1;
            result[step][2] *= shrink0;
            result[step][3] *= shrink1;
            multiply_add(result[step], a, weights0, weights1);
        }
        __syncwarp();
        load(2 * i + 1 + RING);
        commit();
    }
    wait<0>();
    __syncwarp();

    // The warps' results are joined where their rings were.
    sum0 = over_tokens_sum(sum0);
    sum1 = over_tokens_sum(sum1);
    float* mine_at = reinterpret_cast<float*>(rings + warp * RING * HALF);
    const int head0 = 2 * pair, head1 = 2 * pair + 1;
    if (group == 0) {
        warp_top[warp][head0] = top0;
        warp_top[warp][head1] = top1;
        warp_sum[warp][head0] = sum0;
        warp_sum[warp][head1] = sum1;
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int dim = step * 16 + group;
        if (head0 < GROUP) {
            mine_at[head0 * PITCH + dim] = result[step][0];
            mine_at[head0 * PITCH + dim + 8] = result[step][2];
        }
        if (head1 < GROUP) {
            mine_at[head1 * PITCH + dim] = result[step][1];
            mine_at[head1 * PITCH + dim + 8] = result[step][3];
        }
    }
    __syncthreads();
    const long long row_slot = static_cast<long long>(row) * p.splits * heads + kv_head * GROUP;
    for (int index = threadIdx.x; index < GROUP * HEAD_DIM / 2; index += THREADS) {
        const int head = index / (HEAD_DIM / 2), dim = index % (HEAD_DIM / 2) * 2;
        float top = NONE, total = 0, x = 0, y = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, warp_top[w][head]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float weight = exp2_fast(warp_top[w][head] - top);
            const float2 part = *reinterpret_cast<const float2*>(rings + w * RING * HALF + (head * PITCH + dim) * 4);
            total += weight * warp_sum[w][head];
            x += weight * part.x;
            y += weight * part.y;
        }
        const float share = total > 0 ? 1 / total : 0;  // a row without tokens: exactly 0
        if (active == 1) {
            char* out = p.out + row * p.out_row + (kv_head * GROUP + head) * p.out_head;
            *reinterpret_cast<u32*>(out + dim * 2) = pack(x * share, y * share);
        } else {
            const long long slot = row_slot + static_cast<long long>(split) * heads + head;
            *reinterpret_cast<float2*>(p.parts + slot * HEAD_DIM + dim) = make_float2(x * share, y * share);
            // one level for each slice, since every warp vouches for what it has written itself
            if (lane == 0) p.levels[slot * WARPS + warp] = top + log2_fast(total);
        }
    }
    if (active == 1) return;

    // A warp has written the same slice of the parts in every program that shares the row and head. The last of them to
    // come joins that slice's parts, always in the same order.
    __syncwarp();
    int is_last = 0;
    if (lane == 0) {
        int* count = p.arrived + (static_cast<long long>(row) * gridDim.x + kv_head) * WARPS + warp;
        int before;
        asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
        is_last = before == active - 1;
        if (is_last) *count = 0;  // for the next launch
    }
    if (!__shfl_sync(~0u, is_last, 0)) return;
    for (int index = threadIdx.x; index < GROUP * HEAD_DIM / 2; index += THREADS) {
        const int head = index / (HEAD_DIM / 2), dim = index % (HEAD_DIM / 2) * 2;
        float top = NONE, total = 0, x = 0, y = 0;
        for (int first = 0; first < active; first += PARTS) {
            float level[PARTS];
            float2 part[PARTS];
#pragma unroll
            for (int s = 0; s < PARTS; s++) {
                const long long slot = row_slot + static_cast<long long>(min(first + s, active - 1)) * heads + head;
                level[s] = __ldcg(p.levels + slot * WARPS + warp);
                part[s] = __ldcg(reinterpret_cast<const float2*>(p.parts + slot * HEAD_DIM + dim));
                if (first + s >= active) level[s] = NONE;
            }
            float new_top = top;
#pragma unroll
            for (int s = 0; s < PARTS; s++) new_top = fmaxf(new_top, level[s]);
            const float shrink = exp2_fast(top - new_top);
            total *= shrink;
            x *= shrink;
            y *= shrink;
#pragma unroll
            for (int s = 0; s < PARTS; s++) {
                const float weight = exp2_fast(level[s] - new_top);
                total += weight;
                x += weight * part[s].x;
                y += weight * part[s].y;
            }
            top = new_top;
        }
        char* out = p.out + row * p.out_row + (kv_head * GROUP + head) * p.out_head;
        *reinterpret_cast<u32*>(out + dim * 2) = pack(x / total, y / total);
    }
}

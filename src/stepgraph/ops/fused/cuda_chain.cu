// Projections that depend on each other, for up to 8 rows, in one launch: see cuda_chain.py.
//
// As many programs as the device has multiprocessors stay until all is done. A tile is 16 outputs (rows of a weight); a
// program has every so many tiles of each projection. Its warps share the columns: each streams 64 of them at a time
// through a ring of its own in shared memory. The ring does not know of projections: while a program still waits for all
// others to have ended one, its rings fill with the weights of the next, so that the memory is never idle.
//
// The weights are the wide side (16) of a tensor core's instruction and the rows its narrow side (8), so a row of padding
// costs no reading. The columns of an instruction may be any 16, as long as both sides have the same: each lane takes 16
// contiguous bytes.
//
// Compiled with BF16, PDL, WARPS and RING defined.

enum Mode { STORE, ADD, SWIGLU, QKV };  // what becomes of the result

struct Link {
    const char* x;
    const char* norm;  // null: none
    const char* weight;
    const char* bias;  // null: none
    char* out;  // of QKV: the queries
    long long x_row, out_row;  // bytes
    float eps;
    int mode, width, tiles, other;  // other: outputs from the first of a pair to the second, 8 where there are no pairs
};

struct Params {
    Link links[4];
    const long long* positions;
    const int* block_tables;
    const char* cosine;
    const char* sine;
    char* kv;
    long long kv_block, kv_half, kv_token, table_row;  // bytes; of the tables: ints
    u32* arrived;  // programs that wait for all others
    int count, rows, num_heads, kv_heads, block_size;
};

constexpr int STEP = 64, STEP_BYTES = STEP * 2;  // columns
constexpr int TILE_BYTES = 16 * STEP_BYTES;      // of a slot of the ring
constexpr int THREADS = WARPS * 32;
constexpr int PITCH = 9;                         // floats
constexpr int AHEAD = 1;                         // tiles behind the first that are asked into the L2 cache

static_assert(THREADS >= 128, "a thread makes one element of a tile's result");

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) chain(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) char rings[];
    __shared__ float sums[2][WARPS][16 * PITCH], squares_of[2][WARPS][8];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, programs = gridDim.x;

    // The first tile of this program; each projection goes on where the one before it ended, so that all have the same.
    auto first_tile = [&](int index) {
        int before = 0;
        for (int i = 0; i < index; i++) before += p.links[i].tiles;
        return static_cast<int>(blockIdx.x + programs - before % programs) % programs;
    };
    auto first_output = [](const Link& link, int tile) {
        if (link.mode == SWIGLU) return tile * 8;
        if (link.mode != QKV) return tile * 16;
        const int of_head = link.other / 8;
        return tile / of_head * 2 * link.other + tile % of_head * 8;
    };
    auto steps = [&](const Link& link) { return (link.width / STEP - warp + WARPS - 1) / WARPS; };  // of this warp

    // A copy takes 16 bytes a lane: 8 lanes have the 128 bytes of an output. They lie so that the lanes that read them, 4
    // an output, meet no bank twice.
    const char* ring = rings + warp * RING * TILE_BYTES;
    const u32 slots = shared_address(ring);
    const int line = lane >> 3, chunk = lane & 7;
    auto place = [](int output, int chunk) {
        return ((output >> 3) * 2 + (chunk >> 2)) * 512 + (((output & 7) * 4 + (chunk & 3)) ^ (chunk & 4)) * 16;
    };
    struct { int link, tile, left, slot; const char* source; long long four, other; } next;  // to be asked for
    auto aim = [&] {
        for (;; next.link++, next.tile = first_tile(next.link)) {
            if (next.link == p.count) return;
            const Link& link = p.links[next.link];
            if (next.tile >= link.tiles) continue;
            const long long row = link.width * 2LL;
            next.source = link.weight + (first_output(link, next.tile) + line) * row + warp * STEP_BYTES + chunk * 16;
            next.four = 4 * row;
            next.other = link.other * row;
            next.left = steps(link);
            return;
        }
    };
    auto load = [&] {
        if (next.link < p.count) {
            const u32 slot = slots + next.slot * TILE_BYTES;
#pragma unroll
            for (int piece = 0; piece < 4; piece++) {
                const long long from = (piece & 1) * next.four + (piece >> 1) * next.other;
                copy16(slot + place(piece * 4 + line, chunk), next.source + from, true);
            }
            next.source += WARPS * STEP_BYTES;
            next.slot = next.slot + 1 == RING ? 0 : next.slot + 1;
            if (!--next.left) {
                next.tile += programs;
                aim();
            }
        }
        commit();
    };
    next.link = next.slot = 0;
    next.tile = first_tile(0);
    aim();
    for (int i = 0; i < RING; i++) load();
#if PDL
    if (warp == 0 && lane < 16) {
        const Link& link = p.links[0];
        for (int i = 1, tile = first_tile(0) + programs; i <= AHEAD && tile < link.tiles; i++, tile += programs) {
            const int output = first_output(link, tile) + lane % 8 + lane / 8 * link.other;
            ask_into_l2(link.weight + output * 2LL * link.width, link.width * 2);
        }
    }
    if (p.count == 1) let_next_start();
    wait_for_kernel_in_front();
#endif

    const int group = lane >> 2, part = lane & 3;  // of an instruction: its row and its columns
    int slot = 0, buffer = 0;
    for (int index = 0; index < p.count; index++) {
        const Link& link = p.links[index];
        if (index) meet(p.arrived, blockIdx.x ? 1 : 0x80000000u - (programs - 1));
#if PDL
        if (index && index == p.count - 1) let_next_start();
#endif
        const int mine = steps(link);
        const bool normed = link.norm, paired = link.mode == SWIGLU || link.mode == QKV, held = group < p.rows;
        const char* rows_at = link.x + (held ? group : 0) * link.x_row + warp * STEP_BYTES + part * 16;
        const char* norm_at = link.norm + warp * STEP_BYTES + part * 16;
        uint4 rows_next[2], norm_next[2];
        auto load_rows = [&](int step) {  // from memory that is in a cache, one step ahead
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const long long from = step * (WARPS * STEP_BYTES) + side * 64;
                rows_next[side] = held ? load16(rows_at + from) : make_uint4(0, 0, 0, 0);
                if (normed) norm_next[side] = load16(norm_at + from);
            }
        };
        int tile = first_tile(index);
        if (tile < link.tiles) load_rows(0);
        for (; tile < link.tiles; tile += programs) {
            // The element of the result that this thread makes, and what it needs besides, which depends on nothing that
            // this projection writes.
            const int wide = paired ? 3 : 4, row = threadIdx.x >> wide, at = threadIdx.x & ((1 << wide) - 1);
            const int output = first_output(link, tile) + at;
            const bool makes = row < p.rows;
            char* out = link.out + row * link.out_row;
            float before = 0, bias = 0, second_bias = 0, turn[4] = {1, 0, 1, 0};
            long long where = output;
            if (makes) {
                if (link.mode == ADD) before = element(out, output);
                if (link.bias) {
                    bias = element(link.bias, output);
                    if (paired) second_bias = element(link.bias, output + link.other);
                }
                if (link.mode == QKV) {
                    const int head = output / (2 * link.other), column = output % (2 * link.other);
                    const int position = static_cast<int>(p.positions[row]);
                    if (head < p.num_heads + p.kv_heads) {
                        const long long angle = position * 2LL * link.other + column;
                        turn[0] = element(p.cosine, angle);
                        turn[1] = element(p.sine, angle);
                        turn[2] = element(p.cosine, angle + link.other);
                        turn[3] = element(p.sine, angle + link.other);
                    }
                    if (head >= p.num_heads) {
                        const int number = head - p.num_heads;
                        const long long block = p.block_tables[row * p.table_row + position / p.block_size];
                        out = p.kv + block * p.kv_block + position % p.block_size * p.kv_token;
                        out += number / p.kv_heads * p.kv_half;
                        where = number % p.kv_heads * 2 * link.other + column;
                    }
                }
            }

            float result[4] = {}, squares[4] = {};  // of the rows' products with each other
            for (int i = 0; i < mine; i++) {
                uint4 rows[2] = {rows_next[0], rows_next[1]};
                const uint4 scale[2] = {norm_next[0], norm_next[1]};
                load_rows(i + 1 < mine ? i + 1 : 0);
                wait<RING - 1>();
                __syncwarp();
                uint4 a[4];
#pragma unroll
                for (int quarter = 0; quarter < 4; quarter++)
                    a[quarter] = *reinterpret_cast<const uint4*>(
                        ring + slot * TILE_BYTES + place(group + (quarter >> 1) * 8, part + (quarter & 1) * 4));
                __syncwarp();
                load();
                slot = slot + 1 == RING ? 0 : slot + 1;
#pragma unroll
                for (int side = 0; side < 2; side++) {
                    uint4& b = rows[side];
                    if (normed) {
                        multiply_add(squares, b.x, 0, b.y, 0, b.x, b.y);
                        multiply_add(squares, b.z, 0, b.w, 0, b.z, b.w);
                        b = make_uint4(multiply_pair(b.x, scale[side].x), multiply_pair(b.y, scale[side].y),
                                       multiply_pair(b.z, scale[side].z), multiply_pair(b.w, scale[side].w));
                    }
                    const uint4 low = a[side], high = a[2 + side];
                    multiply_add(result, low.x, high.x, low.y, high.y, b.x, b.y);
                    multiply_add(result, low.z, high.z, low.w, high.w, b.z, b.w);
                }
            }

            // The warps' results are joined, always in the same order. The other buffer may still be read from.
            float* mine_at = sums[buffer][warp];
#pragma unroll
            for (int c = 0; c < 4; c++)
                mine_at[(group + (c >> 1) * 8) * PITCH + part * 2 + (c & 1)] = result[c];
            if (part == group / 2)  // it has the product of a row with itself
                squares_of[buffer][warp][group] = group & 1 ? squares[1] : squares[0];
            __syncthreads();
            if (makes) {
                float value = 0, second = 0, square = 0;
#pragma unroll
                for (int w = 0; w < WARPS; w++) {
                    value += sums[buffer][w][at * PITCH + row];
                    if (paired) second += sums[buffer][w][(at + 8) * PITCH + row];
                    if (normed) square += squares_of[buffer][w][row];
                }
                const float factor = normed ? rsqrtf(square / link.width + link.eps) : 1;
                value = value * factor + bias;
                second = second * factor + second_bias;
                if (link.mode == SWIGLU) value = value / (1 + __expf(-value)) * second;
                if (link.mode == ADD) value += before;
                if (link.mode == QKV) {
                    const float turned = value * turn[0] + second * turn[1];
                    store(out, where + link.other, second * turn[2] + value * turn[3]);
                    value = turned;
                }
                store(out, where, value);
            }
            buffer ^= 1;
        }
    }
}

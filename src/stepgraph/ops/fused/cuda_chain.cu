// Projections that depend on each other, for up to 8 rows, in one launch: see cuda_chain.py.
//
// As many programs as the device has multiprocessors stay until all is done. A tile is 16 outputs (rows of a weight); a
// program has every so many tiles of each projection. Its warps share the columns: each streams 64 of them at a time
// through a ring of its own in shared memory, weights, rows and the norm's weights side by side. Weights do not wait for
// projections to end: while a program waits for all others, its rings fill with those of the next projection, and what
// comes after them is asked into the L2 cache, so that the memory is never idle. Rows come when the others have written
// them: loaded any later, with nothing but registers to wait in, they would queue behind the weights at every step.
//
// The weights are the wide side (16) of a tensor core's instruction and the rows its narrow side (8), so a row of padding
// costs no reading. The columns of an instruction may be any 16, as long as both sides have the same: each lane takes 16
// contiguous bytes.
//
// Compiled with BF16, PDL, WARPS, RING and ROWS (a power of two, at least the rows) defined.

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
constexpr int ROWS_AT = 16 * STEP_BYTES;         // in a slot of the ring
constexpr int NORM_AT = ROWS_AT + ROWS * STEP_BYTES;
constexpr int SLOT = NORM_AT + STEP_BYTES;
constexpr int THREADS = WARPS * 32;
constexpr int PITCH = 9;                         // floats
constexpr int AHEAD = 4096;                      // columns behind those of the rings that are asked into the L2 cache

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
    const char* ring = rings + warp * RING * SLOT;
    const u32 slots = shared_address(ring);
    const int line = lane >> 3, chunk = lane & 7;
    auto place = [](int output, int chunk) {
        return ((output >> 3) * 2 + (chunk >> 2)) * 512 + (((output & 7) * 4 + (chunk & 3)) ^ (chunk & 4)) * 16;
    };
    auto row_place = [](int row, int chunk) { return row * STEP_BYTES + ((chunk ^ ((row & 1) << 2)) << 4); };
    auto load_rows = [&](const Link& link, int slot, int step) {
        const char* source = link.x + (warp + step * WARPS) * STEP_BYTES + chunk * 16;
#pragma unroll
        for (int row = line; row < ROWS; row += 4)
            copy16(slots + slot * SLOT + ROWS_AT + row_place(row, chunk), source + min(row, p.rows - 1) * link.x_row,
                   row < p.rows);
    };
    struct { int link, tile, step, slot; const char* source; long long four, other; } next;  // to be asked for
    int index = -1;  // of the projection that is computed: its rows are there
    auto aim = [&] {
        for (;; next.link++, next.tile = first_tile(next.link)) {
            if (next.link == p.count) return;
            const Link& link = p.links[next.link];
            if (next.tile >= link.tiles) continue;
            const long long row = link.width * 2LL;
            next.source = link.weight + (first_output(link, next.tile) + line) * row + warp * STEP_BYTES + chunk * 16;
            next.four = 4 * row;
            next.other = link.other * row;
            next.step = 0;
            return;
        }
    };
    auto load = [&] {
        if (next.link < p.count) {
            const Link& link = p.links[next.link];
            const u32 slot = slots + next.slot * SLOT;
#pragma unroll
            for (int piece = 0; piece < 4; piece++) {
                const long long from = (piece & 1) * next.four + (piece >> 1) * next.other;
                copy16(slot + place(piece * 4 + line, chunk), next.source + from, true);
            }
            if (link.norm && lane < 8)
                copy16(slot + NORM_AT + lane * 16, link.norm + (warp + next.step * WARPS) * STEP_BYTES + lane * 16, true);
            if (next.link == index) load_rows(link, next.slot, next.step);
            next.source += WARPS * STEP_BYTES;
            next.slot = next.slot + 1 == RING ? 0 : next.slot + 1;
            if (++next.step == steps(link)) {
                next.tile += programs;
                aim();
            }
        }
        commit();
    };
    auto ask_ahead = [&](int index) {
        const Link& link = p.links[index];
        int from = RING * WARPS * STEP, left = AHEAD;
        for (int tile = first_tile(index); left > 0 && tile < link.tiles; tile += programs) {
            const int columns = min(link.width - from, left);
            if (columns > 0) {
                const long long output = first_output(link, tile) + lane % 8 + lane / 8 * link.other;
                ask_into_l2(link.weight + (output * link.width + from) * 2, columns * 2);
                left -= columns;
            }
            from = max(from - link.width, 0);
        }
    };
    next.link = next.slot = 0;
    next.tile = first_tile(0);
    aim();
    for (int i = 0; i < RING; i++) load();
#if PDL
    if (warp == 0 && lane < 16) ask_ahead(0);
    if (p.count == 1) let_next_start();
    wait_for_kernel_in_front();
#endif

    const int group = lane >> 2, part = lane & 3;  // of an instruction: its row and its columns
    int slot = 0, buffer = 0;
    for (index = 0; index < p.count; index++) {
        const Link& link = p.links[index];
#if PDL
        if (index && warp == 0 && lane < 16) ask_ahead(index);
#endif
        if (index) meet(p.arrived, blockIdx.x ? 1 : 0x80000000u - (programs - 1));
#if PDL
        if (index && index == p.count - 1) let_next_start();
#endif
        const int mine = steps(link);
        const bool normed = link.norm, paired = link.mode == SWIGLU || link.mode == QKV;
        const int first = first_tile(index), all = first < link.tiles ? (link.tiles - first + programs - 1) / programs : 0;
        for (int i = 0; i < RING; i++) {  // whose weights are on their way
            if (i < all * mine) load_rows(link, (slot + i) % RING, i % mine);
            commit();
        }
        for (int tile = first; tile < link.tiles; tile += programs) {
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
                wait<RING - 1>();
                __syncwarp();
                const char* at = ring + slot * SLOT;
                uint4 a[4], rows[2], scale[2];
#pragma unroll
                for (int quarter = 0; quarter < 4; quarter++)
                    a[quarter] = *reinterpret_cast<const uint4*>(
                        at + place(group + (quarter >> 1) * 8, part + (quarter & 1) * 4));
#pragma unroll
                for (int side = 0; side < 2; side++) {
                    rows[side] = scale[side] = make_uint4(0, 0, 0, 0);
                    if (group < ROWS)
                        rows[side] = *reinterpret_cast<const uint4*>(at + ROWS_AT + row_place(group, part + side * 4));
                    if (normed) scale[side] = *reinterpret_cast<const uint4*>(at + NORM_AT + (part + side * 4) * 16);
                }
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

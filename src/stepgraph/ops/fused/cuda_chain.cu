// Projections that depend on each other, for up to 8 rows, in one launch: see cuda_chain.py.
//
// As many programs as the device has multiprocessors stay until all is done. A tile is 16 outputs (rows of a weight); a
// program has every so many tiles of each projection. One of its warps asks the copy engine for what the others multiply:
// stages of some columns of a tile, of the rows and of the norm's weights, through a ring in shared memory. Weights depend
// on nothing: while a program waits for all others to end a projection, its ring fills with those of the next, and what
// comes after them is asked into the L2 cache, so that the memory is never idle. Rows follow when all have written them.
//
// Of a stage each warp has 64 columns. The weights are the wide side (16) of a tensor core's instruction and the rows its
// narrow side (8), so a row of padding costs no reading. The columns of an instruction may be any 16, as long as both
// sides have the same: each lane takes 16 contiguous bytes.
//
// Compiled with BF16, PDL, WARPS (that multiply), RING and ROWS (at least the rows) defined.

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

constexpr int MINE = 64;                 // columns of a warp in a stage
constexpr int COLUMNS = WARPS * MINE;
constexpr int LINE = COLUMNS * 2 + 64;   // bytes; the lanes that read two lines at once meet no bank twice
constexpr int ROWS_AT = 16 * LINE, NORM_AT = ROWS_AT + ROWS * LINE, SLOT = NORM_AT + LINE;  // in a slot of the ring
constexpr int WORKERS = WARPS * 32;      // threads that multiply
constexpr int PITCH = 9;                 // floats
constexpr int AHEAD = 4096;              // columns behind those of the ring that are asked into the L2 cache

static_assert(WORKERS >= 128, "a thread makes one element of a tile's result");

// The first output of a tile. A tile of pairs has 8 outputs and those that belong to them.
__device__ __forceinline__ int first_output(int mode, int other, int tile) {
    if (mode == SWIGLU) return tile * 8;
    if (mode != QKV) return tile * 16;
    const int of_head = other / 8;
    return tile / of_head * 2 * other + tile % of_head * 8;
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32, WARPS > 8 ? 1 : 2) chain(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) char ring[];
    __shared__ float sums[2][WARPS][16 * PITCH], squares_of[2][WARPS][8];
    __shared__ Barrier full[RING], empty[RING], ready, finished;
    __shared__ int first_tiles[4];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, programs = gridDim.x;
    if (threadIdx.x == 0) {
        for (int i = 0; i < RING; i++) {
            prepare(full[i], 1);
            prepare(empty[i], WARPS);
        }
        prepare(ready, 1);
        prepare(finished, WARPS);
        show_barriers();
        // Each projection goes on where the one before it ended, so that all programs have the same to do.
        int before = 0;
        for (int i = 0; i < p.count; i++) {
            first_tiles[i] = static_cast<int>(blockIdx.x + programs - before % programs) % programs;
            before += p.links[i].tiles;
        }
    }
    __syncthreads();

    if (warp == WARPS) {
        // The stages whose weights have been asked for, and whose rows have.
        struct Place { int link, tile, column, slot, turn; } weights = {0, first_tiles[0], 0, 0, 0}, rows = weights;
        auto settle = [&](Place& place) {  // at the next tile that there is
            while (place.link < p.count && place.tile >= p.links[place.link].tiles) {
                place.link++;
                place.tile = place.link < p.count ? first_tiles[place.link] : 0;
            }
        };
        auto go_on = [&](Place& place) {
            if (++place.slot == RING) {
                place.slot = 0;
                place.turn ^= 1;
            }
            place.column += COLUMNS;
            if (place.column >= p.links[place.link].width) {
                place.column = 0;
                place.tile += programs;
                settle(place);
            }
        };
        // All lanes come to what one of them does, so that the compiler knows its addresses to be the warp's.
        auto ask_weights = [&] {
            const Link& link = p.links[weights.link];
            const int bytes = min(COLUMNS, link.width - weights.column) * 2;
            char* slot = ring + weights.slot * SLOT;
            Barrier& whole = full[weights.slot];
            wait_for(empty[weights.slot], weights.turn ^ 1);
            if (chosen()) {
                arrive_and_expect(whole, bytes * (16 + p.rows + (link.norm != nullptr)));
                const long long row = link.width * 2LL;
                const int output = first_output(link.mode, link.other, weights.tile);
                const char* source = link.weight + output * row + weights.column * 2;
#pragma unroll
                for (int line = 0; line < 16; line++)
                    copy_bulk(slot + line * LINE, source + (line % 8 + line / 8 * link.other) * row, bytes, whole);
                if (link.norm) copy_bulk(slot + NORM_AT, link.norm + weights.column * 2, bytes, whole);
            }
            go_on(weights);
        };
        auto ask_rows = [&] {
            const Link& link = p.links[rows.link];
            const int bytes = min(COLUMNS, link.width - rows.column) * 2;
            if (chosen()) {
#pragma unroll
                for (int row = 0; row < ROWS; row++)
                    if (row < p.rows)
                        copy_bulk(ring + rows.slot * SLOT + ROWS_AT + row * LINE, link.x + row * link.x_row + rows.column * 2,
                                  bytes, full[rows.slot]);
            }
            go_on(rows);
        };
        auto ask_ahead = [&] {
            if (weights.link == p.count || !chosen()) return;
            const Link& link = p.links[weights.link];
            const long long row = link.width * 2LL;
            int column = weights.column, left = AHEAD;
            for (int tile = weights.tile; left > 0 && tile < link.tiles; tile += programs, column = 0) {
                const int columns = min(link.width - column, left);
                const char* source = link.weight + first_output(link.mode, link.other, tile) * row + column * 2;
#pragma unroll
                for (int line = 0; line < 16; line++)
                    ask_into_l2(source + (line % 8 + line / 8 * link.other) * row, columns * 2);
                left -= columns;
            }
        };
        settle(weights);
        rows = weights;
        int waiting = 0;  // stages whose rows have not been asked for
        for (int index = 0; index < p.count; index++) {
            for (; waiting < RING && weights.link < p.count; waiting++) ask_weights();
#if PDL
            ask_ahead();
            __syncwarp();
#endif
            if (index == 0) {
#if PDL
                if (p.count == 1) let_next_start();
                wait_for_kernel_in_front();
#endif
            } else {
                wait_for(finished, (index - 1) & 1);
                if (chosen()) meet(p.arrived, blockIdx.x ? 1 : 0x80000000u - (programs - 1));
                __syncwarp();
#if PDL
                if (index == p.count - 1) let_next_start();
#endif
            }
            let_copies_see();
            if (chosen()) arrive(ready);
            for (; waiting && rows.link == index; waiting--) ask_rows();
            while (weights.link == index) {
                ask_weights();
                ask_rows();
            }
        }
        return;
    }

#if PDL
    if (p.count == 1) let_next_start();
    wait_for_kernel_in_front();
#endif
    const int group = lane >> 2, part = lane & 3;  // of an instruction: its row and its columns
    const char* mine_at = ring + warp * MINE * 2 + part * 16;
    int slot = 0, turn = 0, buffer = 0;
    for (int index = 0; index < p.count; index++) {
        wait_for(ready, index & 1);
#if PDL
        if (index && index == p.count - 1) let_next_start();
#endif
        const Link& link = p.links[index];
        const int mode = link.mode, width = link.width, tiles = link.tiles, other = link.other;
        const bool normed = link.norm, paired = mode == SWIGLU || mode == QKV;
        const int wide = paired ? 3 : 4, row = threadIdx.x >> wide, at = threadIdx.x & ((1 << wide) - 1);
        const bool makes = row < p.rows;  // one element of a tile's result
        for (int tile = first_tiles[index]; tile < tiles; tile += programs) {
            // What the element needs besides is asked for now, and looked at in the end.
            const int output = first_output(mode, other, tile) + at;
            char* out = link.out + row * link.out_row;
            unsigned short before = 0, bias[2] = {}, angle[4] = {};
            long long where = output;
            if (makes) {
                if (mode == ADD) before = raw(out, output);
                if (link.bias) {
                    bias[0] = raw(link.bias, output);
                    if (paired) bias[1] = raw(link.bias, output + other);
                }
                if (mode == QKV) {
                    const int head = output / (2 * other), column = output % (2 * other);
                    const int position = static_cast<int>(p.positions[row]);
                    if (head < p.num_heads + p.kv_heads) {
                        const long long from = position * 2LL * other + column;
                        angle[0] = raw(p.cosine, from);
                        angle[1] = raw(p.sine, from);
                        angle[2] = raw(p.cosine, from + other);
                        angle[3] = raw(p.sine, from + other);
                    }
                    if (head >= p.num_heads) {
                        const int number = head - p.num_heads;
                        const long long block = p.block_tables[row * p.table_row + position / p.block_size];
                        out = p.kv + block * p.kv_block + position % p.block_size * p.kv_token;
                        out += number / p.kv_heads * p.kv_half;
                        where = number % p.kv_heads * 2 * other + column;
                    }
                }
            }

            float result[4] = {}, squares[4] = {};  // of the rows' products with each other
            for (int column = warp * MINE; column - warp * MINE < width; column += COLUMNS) {
                wait_for(full[slot], turn);
                const char* from = mine_at + slot * SLOT;
                uint4 a[4], rows[2], scale[2];
#pragma unroll
                for (int quarter = 0; quarter < 4; quarter++)
                    a[quarter] = load16(from + (group + (quarter >> 1) * 8) * LINE + (quarter & 1) * 64);
#pragma unroll
                for (int side = 0; side < 2; side++) {
                    rows[side] = scale[side] = make_uint4(0, 0, 0, 0);
                    if (group < p.rows) rows[side] = load16(from + ROWS_AT + group * LINE + side * 64);
                    if (normed) scale[side] = load16(from + NORM_AT + side * 64);
                }
                __syncwarp();
                if (lane == 0) arrive(empty[slot]);
                if (++slot == RING) {
                    slot = 0;
                    turn ^= 1;
                }
                if (column >= width) continue;
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
            float* sums_of_warp = sums[buffer][warp];
#pragma unroll
            for (int c = 0; c < 4; c++)
                sums_of_warp[(group + (c >> 1) * 8) * PITCH + part * 2 + (c & 1)] = result[c];
            if (part == group / 2)  // it has the product of a row with itself
                squares_of[buffer][warp][group] = group & 1 ? squares[1] : squares[0];
            meet_workers(WORKERS);
            if (makes) {
                float value = 0, second = 0, square = 0;
#pragma unroll
                for (int w = 0; w < WARPS; w++) {
                    value += sums[buffer][w][at * PITCH + row];
                    if (paired) second += sums[buffer][w][(at + 8) * PITCH + row];
                    if (normed) square += squares_of[buffer][w][row];
                }
                const float factor = normed ? rsqrtf(square / width + link.eps) : 1;
                value = value * factor + widened(bias[0]);
                second = second * factor + widened(bias[1]);
                if (mode == SWIGLU) value = value / (1 + __expf(-value)) * second;
                if (mode == ADD) value += widened(before);
                if (mode == QKV) {
                    if (output / (2 * other) < p.num_heads + p.kv_heads) {
                        const float turned = value * widened(angle[0]) + second * widened(angle[1]);
                        second = second * widened(angle[2]) + value * widened(angle[3]);
                        value = turned;
                    }
                    store(out, where + other, second);
                }
                store(out, where, value);
            }
            buffer ^= 1;
        }
        let_copies_see();
        __syncwarp();
        if (lane == 0) arrive(finished);
    }
}

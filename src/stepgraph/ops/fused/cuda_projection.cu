// A projection of a few rows with all that surrounds it, one kernel: see cuda_projection.py.
//
// A program owns 16 outputs (rows of the weight) or a few times 16. Its warps share the columns: each streams 64 of them
// at a time through a ring of its own in shared memory, weights, rows and the norm's weights side by side, so that
// nothing but the end needs a barrier. The weights fill the ring before the kernel in front has ended. They are the wide
// side (16) of a tensor core's instruction and the rows its narrow side (8), so a row of padding costs no reading.
// The columns of an instruction may be any 16, as long as both sides have the same: each lane takes 16 contiguous bytes.
//
// Compiled with MODE, NORM, BIAS, BF16, PDL, WARPS, RING, TILES and ROWS (a power of two, at least the rows) defined.

struct Params {
    const char* x;
    const char* norm;
    const char* weight;
    const char* bias;
    char* out;  // of QKV: the queries
    const long long* positions;
    const int* block_tables;
    const char* cosine;
    const char* sine;
    char* kv;
    long long x_row, out_row, kv_block, kv_half, kv_token, table_row;  // bytes; of the tables: ints
    float eps;
    int rows, width, other, num_heads, kv_heads, block_size;  // other: outputs from the first of a pair to the second
};

enum { STORE, ADD, SWIGLU, QKV };  // of MODE: what becomes of the result

constexpr int STEP = 64, STEP_BYTES = STEP * 2;       // columns
constexpr bool PAIRED = MODE == SWIGLU || MODE == QKV;
constexpr int WIDE = PAIRED ? 8 : 16;                // columns of the output in 16 outputs
constexpr int COLUMNS = WIDE * TILES;                // of a program
constexpr int NARROW = ROWS > 8 ? ROWS / 8 : 1;      // instructions side by side
constexpr int TILE_BYTES = 16 * STEP_BYTES;
constexpr int ROWS_AT = TILES * TILE_BYTES;          // in a slot of the ring
constexpr int NORM_AT = ROWS_AT + ROWS * STEP_BYTES;
constexpr int SLOT = NORM_AT + NORM * STEP_BYTES;
constexpr int THREADS = WARPS * 32;
constexpr int AT_ONCE = (TILES * NARROW == 1 ? 768 : TILES * NARROW <= 4 ? 512 : 256) / THREADS;  // on a multiprocessor
constexpr int PITCH = NARROW * 8 + 1;                // floats
constexpr int EACH = (COLUMNS * ROWS + THREADS - 1) / THREADS;  // elements of the result that a thread makes

static_assert(TILES * 16 * PITCH * 4 <= RING * SLOT, "the result lies where the ring was");
extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE) project(const Params p) {
    extern __shared__ __align__(128) char rings[];
    __shared__ float warp_squares[WARPS][NARROW * 8];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int column = blockIdx.x * COLUMNS;         // the first, of the head in QKV
    const int head = blockIdx.y, half = p.other;
    const int first = MODE == QKV ? head * 2 * half + column : column;  // output
    const int steps = p.width / STEP, mine = max((steps - warp + WARPS - 1) / WARPS, 0);
    const long long weight_row = p.width * 2LL;
#if PDL
    let_next_start();
#endif

    // A copy takes 16 bytes a lane: 8 lanes have the 128 bytes of a row. They lie so that the lanes that read them, 4 a
    // row, meet no bank twice.
    char* ring = rings + warp * RING * SLOT;
    const u32 slots = shared_address(ring);
    const int line = lane >> 3, chunk = lane & 7;
    auto tile_place = [](int row, int chunk) {
        return ((row >> 3) * 2 + (chunk >> 2)) * 512 + (((row & 7) * 4 + (chunk & 3)) ^ (chunk & 4)) * 16;
    };
    auto row_place = [](int row, int chunk) { return row * STEP_BYTES + ((chunk ^ ((row & 1) << 2)) << 4); };
    const char* weight = p.weight + (first + line) * weight_row + warp * STEP_BYTES + chunk * 16;
    const unsigned long long policy = read_once();
    auto load_weights = [&](int i) {
        if (i >= mine) return;
        const u32 slot = slots + (i % RING) * SLOT;
        const char* source = weight + static_cast<long long>(i) * (WARPS * STEP_BYTES);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int piece = 0; piece < 4; piece++) {
                const long long row = tile * WIDE + (piece & 1) * 4 + static_cast<long long>(piece >> 1) * (PAIRED ? half : 8);
                copy16(slot + tile * TILE_BYTES + tile_place(piece * 4 + line, chunk), source + row * weight_row, policy);
            }
        if (NORM && lane < 8)
            copy16(slot + NORM_AT + lane * 16, p.norm + (warp + i * WARPS) * STEP_BYTES + lane * 16, true);
    };
    auto load_rows = [&](int i) {
        if (i >= mine) return;
        const u32 slot = slots + (i % RING) * SLOT + ROWS_AT;
        const char* source = p.x + (warp + i * WARPS) * STEP_BYTES + chunk * 16;
#pragma unroll
        for (int row = line; row < ROWS; row += 4)
            copy16(slot + row_place(row, chunk), source + min(row, p.rows - 1) * p.x_row, row < p.rows);
    };

#pragma unroll
    for (int i = 0; i < RING; i++) {
        load_weights(i);
        commit();
    }
    // What this thread's elements of the result need besides: asked for now, since it depends on nothing.
    [[maybe_unused]] float turn[EACH][4], bias[EACH][2];
    [[maybe_unused]] long long place[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int index = threadIdx.x + e * THREADS, row = index / COLUMNS, at = index % COLUMNS;
        if (row >= p.rows) continue;
        if (BIAS) {
            bias[e][0] = element(p.bias, first + at);
            if (PAIRED) bias[e][1] = element(p.bias, first + at + half);
        }
        if (MODE == QKV) {
            const int position = static_cast<int>(p.positions[row]);
            const long long angle = position * 2LL * half + column + at;
            turn[e][0] = element(p.cosine, angle);
            turn[e][1] = element(p.sine, angle);
            turn[e][2] = element(p.cosine, angle + half);
            turn[e][3] = element(p.sine, angle + half);
            const long long block = p.block_tables[row * p.table_row + position / p.block_size];
            place[e] = block * p.kv_block + position % p.block_size * p.kv_token;
        }
    }
#if PDL
    wait_for_kernel_in_front();
#endif
#pragma unroll
    for (int i = 0; i < RING; i++) {
        load_rows(i);
        commit();
    }
    [[maybe_unused]] float before[EACH];
    if (MODE == ADD) {
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int index = threadIdx.x + e * THREADS, row = index / COLUMNS, at = index % COLUMNS;
            if (row < p.rows) before[e] = element(p.out + row * p.out_row, first + at);
        }
    }

    const int group = lane >> 2, part = lane & 3;  // of an instruction: its row and its columns
    float result[TILES][NARROW][4] = {}, squares[NARROW][4] = {};  // of the rows' products with each other
    for (int i = 0; i < mine; i++) {
        wait<RING - 1>();
        __syncwarp();
        const char* slot = ring + (i % RING) * SLOT;
        uint4 a[TILES][4], b[NARROW][2], scale[2];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++)
                a[tile][quarter] = *reinterpret_cast<const uint4*>(
                    slot + tile * TILE_BYTES + tile_place(group + (quarter >> 1) * 8, part + (quarter & 1) * 4));
#pragma unroll
        for (int narrow = 0; narrow < NARROW; narrow++)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const int row = narrow * 8 + group;
                b[narrow][side] = make_uint4(0, 0, 0, 0);
                if (row < ROWS)
                    b[narrow][side] =
                        *reinterpret_cast<const uint4*>(slot + ROWS_AT + row_place(row, part + side * 4));
            }
        if (NORM) {
#pragma unroll
            for (int side = 0; side < 2; side++)
                scale[side] = *reinterpret_cast<const uint4*>(slot + NORM_AT + (part + side * 4) * 16);
        }
        __syncwarp();
        load_weights(i + RING);
        load_rows(i + RING);
        commit();
#pragma unroll
        for (int side = 0; side < 2; side++) {
            if (NORM) {
#pragma unroll
                for (int narrow = 0; narrow < NARROW; narrow++) {
                    uint4& rows = b[narrow][side];
                    multiply_add(squares[narrow], rows.x, 0, rows.y, 0, rows.x, rows.y);
                    multiply_add(squares[narrow], rows.z, 0, rows.w, 0, rows.z, rows.w);
                    rows = make_uint4(multiply_pair(rows.x, scale[side].x), multiply_pair(rows.y, scale[side].y),
                                      multiply_pair(rows.z, scale[side].z), multiply_pair(rows.w, scale[side].w));
                }
            }
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int narrow = 0; narrow < NARROW; narrow++) {
                    const uint4 low = a[tile][side], high = a[tile][2 + side], rows = b[narrow][side];
                    multiply_add(result[tile][narrow], low.x, high.x, low.y, high.y, rows.x, rows.y);
                    multiply_add(result[tile][narrow], low.z, high.z, low.w, high.w, rows.z, rows.w);
                }
        }
    }

    // The warps' results are joined where their rings were, always in the same order.
    wait<0>();
    __syncwarp();
    float* sums = reinterpret_cast<float*>(ring);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int narrow = 0; narrow < NARROW; narrow++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                sums[(tile * 16 + group + (c >> 1) * 8) * PITCH + narrow * 8 + part * 2 + (c & 1)] = result[tile][narrow][c];
    if (NORM) {
#pragma unroll
        for (int narrow = 0; narrow < NARROW; narrow++)
            if (part == group / 2)  // it has the product of a row with itself
                warp_squares[warp][narrow * 8 + group] = group & 1 ? squares[narrow][1] : squares[narrow][0];
    }
    __syncthreads();
    auto total = [](int output, int row) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += reinterpret_cast<const float*>(rings + w * RING * SLOT)[output * PITCH + row];
        return sum;
    };
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int index = threadIdx.x + e * THREADS, row = index / COLUMNS, at = index % COLUMNS;
        if (row >= p.rows) continue;
        const int output = at / WIDE * 16 + at % WIDE;
        float value = total(output, row), second = PAIRED ? total(output + 8, row) : 0;
        if (NORM) {
            float sum = 0;
            for (int w = 0; w < WARPS; w++) sum += warp_squares[w][row];
            const float factor = rsqrtf(sum / p.width + p.eps);
            value *= factor;
            second *= factor;
        }
        if (BIAS) {
            value += bias[e][0];
            if (PAIRED) second += bias[e][1];
        }
        char* out = p.out + row * p.out_row;
        if (MODE == STORE) store(out, first + at, value);
        if (MODE == ADD) store(out, first + at, value + before[e]);
        if (MODE == SWIGLU) store(out, first + at, value / (1 + __expf(-value)) * second);
        if (MODE == QKV) {
            if (head < p.num_heads + p.kv_heads) {
                const float turned = value * turn[e][0] + second * turn[e][1];
                second = second * turn[e][2] + value * turn[e][3];
                value = turned;
            }
            long long where = first + at;
            if (head >= p.num_heads) {
                const int number = head - p.num_heads;
                out = p.kv + place[e] + number / p.kv_heads * p.kv_half;
                where = number % p.kv_heads * 2 * half + column + at;
            }
            store(out, where, value);
            store(out, where + half, second);
        }
    }
}

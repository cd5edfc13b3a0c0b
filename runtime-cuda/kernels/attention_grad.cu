// Gradients of attention (Dao 2023): weights are computed again from the scores and their logsumexp. Keys and queries have a pass
// each, so that every sum has one owner and one order; a single pass would need atomic additions for the queries. Defines: T (f16,
// bf16, float), HEAD_DIM (a multiple of 16), WARPGROUP (tile.cuh).
#include "tile.cuh"

// Rows of a step of the operands that are walked: more have more products between two barriers, fewer leave registers for the sums.
#define BLOCK (sizeof(T) == 4 ? 16 : HEAD_DIM <= 64 ? 64 : 32)
// Blocks that a multiprocessor is to hold, of queries.
#define QUERY_RESIDENT (sizeof(T) == 2 && HEAD_DIM <= 64 ? 3 : 1)

// Lanes of a query in `attention_dots`: each has 16 bytes of its row, the last perhaps none.
#define DOT_WORDS (HEAD_DIM * (int)sizeof(T) / 16)
#define DOT_LANES (DOT_WORDS <= 2 ? 2 : DOT_WORDS <= 4 ? 4 : DOT_WORDS <= 8 ? 8 : DOT_WORDS <= 16 ? 16 : 32)

// sum_e g o of every query: blockDim = [32, 4], gridDim = [ceil(batches * heads * queries / (128 / DOT_LANES))]; `dots`: [B, H, T].
KERNEL void attention_dots(float* dots, const T* g, const T* o, CONSTANT Heads g_at, CONSTANT Heads o_at, CONSTANT Sizes sizes) {
    const int PER = 16 / (int)sizeof(T), ROWS = WARP / DOT_LANES;
    i64 row = ((i64)blockIdx.x * blockDim.y + threadIdx.y) * ROWS + threadIdx.x / DOT_LANES;
    int word = threadIdx.x % DOT_LANES;
    bool inside = row < (i64)sizes.batches * sizes.heads * sizes.queries;
    float sum = 0.0f;
    if (inside && word < DOT_WORDS) {
        i64 line = quotient(row, sizes.queries), query = row - line * sizes.queries, batch = quotient(line, sizes.heads),
            head = line - batch * sizes.heads;
        float left[PER], right[PER];
        load_pack(left, g + batch * g_at.batch + head * g_at.head + query * g_at.row + word * PER);
        load_pack(right, o + batch * o_at.batch + head * o_at.head + query * o_at.row + word * PER);
        for (int i = 0; i < PER; i++) sum += left[i] * right[i];
    }
    for (int d = DOT_LANES / 2; d > 0; d /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, d);
    if (inside && word == 0) dots[row] = sum;
}

// What the exponents of a query's weights are relative to: a query that saw nothing has no finite logsumexp, and no weights.
DEVICE float base_of(float lse) { return lse == -infinity(0.0f) ? infinity(0.0f) : lse * LOG2_E; }

// The gradients of keys and values: a block of keys walks the queries of all heads that share them.
// gridDim = [ceil(keys / BLOCK_ROWS) * heads / group * batches], blockDim = [128], shared memory (2 BLOCK_ROWS + 4 BLOCK) * (HEAD_DIM * sizeof(T) +
// 16).
// Two blocks a multiprocessor: left alone, the compiler spills for a third.
KERNEL void __launch_bounds__(THREADS, 2)
    attention_grad_keys(T* dk, T* dv, const T* g, const T* q, const T* k, const T* v, const T* mask, const float* lse,
                        const float* dots, CONSTANT Heads dk_at, CONSTANT Heads dv_at, CONSTANT Heads g_at, CONSTANT Heads q_at,
                        CONSTANT Heads k_at, CONSTANT Heads v_at, CONSTANT Mask mask_at, CONSTANT Sizes sizes, int causal,
                        float scale PROGRAM_PARAMETER) {
    DYNAMIC_SHARED(memory);
    T* k_tile = first_tile(memory);
    T* v_tile = k_tile + BLOCK_ROWS * TILE_ROW;
    T* q_tiles = v_tile + BLOCK_ROWS * TILE_ROW;
    T* g_tiles = q_tiles + 2 * BLOCK * TILE_ROW;

    int blocks = (sizes.keys + BLOCK_ROWS - 1) / BLOCK_ROWS, first = (int)(blockIdx.x % blocks) * BLOCK_ROWS;
    int line = blockIdx.x / blocks, kvs = sizes.heads / sizes.group, kv = line % kvs, batch = line / kvs;
    copy_rows<BLOCK_ROWS>(k_tile, k + batch * k_at.batch + kv * k_at.head, k_at.row, first, sizes.keys);
    copy_rows<BLOCK_ROWS>(v_tile, v + batch * v_at.batch + kv * v_at.head, v_at.row, first, sizes.keys);
    q += batch * q_at.batch + kv * sizes.group * q_at.head;
    g += batch * g_at.batch + kv * sizes.group * g_at.head;

    // With a causal mask, queries before the first key see none of these.
    int skipped = causal ? first / BLOCK : 0, all = (sizes.queries + BLOCK - 1) / BLOCK;
    int steps = all > skipped ? all - skipped : 0;
    int row = warp_row();
    float dk_sums[COLUMN_TILES][4] = {}, dv_sums[COLUMN_TILES][4] = {};
    Learned learned;

    auto fetch = [&](int i, int stage) {
        int shared = i / steps, from = (skipped + i % steps) * BLOCK;
        copy_rows<BLOCK>(q_tiles + stage * BLOCK * TILE_ROW, q + shared * q_at.head, q_at.row, from, sizes.queries);
        copy_rows<BLOCK>(g_tiles + stage * BLOCK * TILE_ROW, g + shared * g_at.head, g_at.row, from, sizes.queries);
    };
    auto use = [&](int i, int stage) {
        int head = kv * sizes.group + i / steps, from = (skipped + i % steps) * BLOCK;
        const T* q_tile = q_tiles + stage * BLOCK * TILE_ROW;
        const T* g_tile = g_tiles + stage * BLOCK * TILE_ROW;
        const T* bias = mask ? mask + batch * mask_at.batch + head * mask_at.head : mask;
        i64 queries = ((i64)batch * sizes.heads + head) * sizes.queries;
        const int N = BLOCK / 8;
        // Read before the products, which hide the time that it takes.
        float base[N][2], dot[N][2];
        EACH (n, N)
            EACH (e, 2) {
                int query = from + column_of(n, e);
                bool inside = query < sizes.queries;
                base[n][e] = base_of(inside ? lse[queries + query] : 0.0f), dot[n][e] = inside ? dots[queries + query] : 0.0f;
            }
        float p[N][4] = {}, d[N][4] = {};
        // Rows are keys here and columns queries, so that the weights have the layout of the next matmul's operand.
        Tiles<T>::scores(p, k_tile, q_tile);
        Tiles<T>::scores(d, v_tile, g_tile);
        Scores scores = SCORES(bias, batch, head);
        float unit = scores.prepare<true>(p, first + row, from);
        EACH (n, N)
            EACH (e, 2)
                EACH (r, 2) {
                    float &weight = p[n][2 * r + e], &back = d[n][2 * r + e];
                    int query = from + column_of(n, e), key = first + row + row_of(2 * r);
                    float score = weight, of_arguments[LEARNED + 1];
                    weight = exp2_flushed(scores.exponent(score, unit, query, key) - base[n][e]);
                    back = scores.back(score, weight * (back - dot[n][e]), query, key, of_arguments);
                    learned.add(r, of_arguments);
                }
        // The last queries of a head.
        if (LEARNED > 0 && i % steps == steps - 1) learned.store(scores, (i64)batch * sizes.heads + head, first + row, sizes.keys);
        Tiles<T>::weighted(dv_sums, p, g_tile);
        Tiles<T>::weighted(dk_sums, d, q_tile);
    };
    pipeline(steps * sizes.group, fetch, use);

    const float by_scale[2] = {scale, scale}, by_one[2] = {1.0f, 1.0f};
    store_rows(dk + batch * dk_at.batch + kv * dk_at.head, dk_at.row, first + row, sizes.keys, dk_sums, by_scale);
    store_rows(dv + batch * dv_at.batch + kv * dv_at.head, dv_at.row, first + row, sizes.keys, dv_sums, by_one);
}

// The gradient of queries: a block of queries walks the keys. gridDim = [ceil(queries / BLOCK_ROWS) * heads * batches],
// blockDim and shared memory as above.
KERNEL void __launch_bounds__(THREADS, QUERY_RESIDENT)
    attention_grad_queries(T* dq, const T* g, const T* q, const T* k, const T* v, const T* mask, const float* lse,
                           const float* dots, CONSTANT Heads dq_at, CONSTANT Heads g_at, CONSTANT Heads q_at, CONSTANT Heads k_at,
                           CONSTANT Heads v_at, CONSTANT Mask mask_at, CONSTANT Sizes sizes, int causal, float scale
                           PROGRAM_PARAMETER) {
    DYNAMIC_SHARED(memory);
    T* q_tile = first_tile(memory);
    T* g_tile = q_tile + BLOCK_ROWS * TILE_ROW;
    T* k_tiles = g_tile + BLOCK_ROWS * TILE_ROW;
    T* v_tiles = k_tiles + 2 * BLOCK * TILE_ROW;

    int blocks = (sizes.queries + BLOCK_ROWS - 1) / BLOCK_ROWS, first = (blocks - 1 - (int)(blockIdx.x % blocks)) * BLOCK_ROWS;
    int line = blockIdx.x / blocks, head = line % sizes.heads, batch = line / sizes.heads, kv = head / sizes.group;
    copy_rows<BLOCK_ROWS>(q_tile, q + batch * q_at.batch + head * q_at.head, q_at.row, first, sizes.queries);
    copy_rows<BLOCK_ROWS>(g_tile, g + batch * g_at.batch + head * g_at.head, g_at.row, first, sizes.queries);
    k += batch * k_at.batch + kv * k_at.head;
    v += batch * v_at.batch + kv * v_at.head;
    if (mask) mask += batch * mask_at.batch + head * mask_at.head;

    int visible = causal && first + BLOCK_ROWS < sizes.keys ? first + BLOCK_ROWS : sizes.keys;
    int row = warp_row();
    Scores scores = SCORES(mask, batch, head);
    float base[2], dot[2], sums[COLUMN_TILES][4] = {};
    Learned learned;
    EACH (r, 2) {
        int query = first + row + row_of(2 * r);
        bool inside = query < sizes.queries;
        base[r] = base_of(inside ? lse[(i64)line * sizes.queries + query] : 0.0f);
        dot[r] = inside ? dots[(i64)line * sizes.queries + query] : 0.0f;
    }

    auto fetch = [&](int i, int stage) {
        copy_rows<BLOCK>(k_tiles + stage * BLOCK * TILE_ROW, k, k_at.row, i * BLOCK, sizes.keys);
        copy_rows<BLOCK>(v_tiles + stage * BLOCK * TILE_ROW, v, v_at.row, i * BLOCK, sizes.keys);
    };
    auto use = [&](int i, int stage) {
        const T* k_tile = k_tiles + stage * BLOCK * TILE_ROW;
        const int N = BLOCK / 8;
        float p[N][4] = {}, d[N][4] = {};
        Tiles<T>::scores(p, q_tile, k_tile);
        Tiles<T>::scores(d, g_tile, v_tiles + stage * BLOCK * TILE_ROW);
        float unit = scores.prepare<false>(p, first + row, i * BLOCK);
        EACH (n, N)
            EACH (e, 4) {
                int query = first + row + row_of(e), key = i * BLOCK + column_of(n, e);
                float weight = exp2_flushed(scores.exponent(p[n][e], unit, query, key) - base[e / 2]), of_arguments[LEARNED + 1];
                d[n][e] = scores.back(p[n][e], weight * (d[n][e] - dot[e / 2]), query, key, of_arguments);
                learned.add(e / 2, of_arguments);
            }
        Tiles<T>::weighted(sums, d, k_tile);
    };
    pipeline((visible + BLOCK - 1) / BLOCK, fetch, use);

    learned.store(scores, line, first + row, sizes.queries);
    const float by_scale[2] = {scale, scale};
    store_rows(dq + batch * dq_at.batch + head * dq_at.head, dq_at.row, first + row, sizes.queries, sums, by_scale);
}

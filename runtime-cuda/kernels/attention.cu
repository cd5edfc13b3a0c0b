// Scaled dot-product attention in blocks with an online softmax (Dao 2023): softmax(q k^T scale + mask) v, and the scores'
// logsumexp. Defines: T (f16, bf16, float), HEAD_DIM (a multiple of 16), WARPGROUP (tile.cuh).
#include "tile.cuh"

// Keys of a block.
#define KEYS (sizeof(T) == 2 ? 64 : 32)

// Blocks that a multiprocessor is to hold: registers are limited for them, where that spills nothing.
#define RESIDENT (sizeof(T) == 2 && HEAD_DIM <= 64 ? 4 : 1)

// Running softmaxes: their rows' largest scores, and this lane's part of their sums.
struct Online {
    float top[2], sum[2];

    // Takes a row's new largest score; returns the factor that rescales its earlier sums.
    DEVICE float raise(int r, float next) {
        float base = finite_or_zero(next), factor = top[r] == next ? 1.0f : exp2_flushed(top[r] - base);
        top[r] = next;
        sum[r] *= factor;
        return factor;
    }

    // Turns scores, each still to be multiplied by `unit`, into weights; returns the factor that rescales earlier sums. A score that is
    // NaN has no part in the largest, and gives a weight that is NaN.
    template <int N> DEVICE void weigh(float (&s)[N][4], float unit, float (&factor)[2]) {
        EACH (r, 2) {
            float largest = s[0][2 * r];
            EACH (n, N) largest = fmaxf(largest, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
            float next = fmaxf(top[r], largest * unit);
            factor[r] = raise(r, next);
            float base = finite_or_zero(next);
            EACH (n, N)
                EACH (e, 2) {
                    float& weight = s[n][2 * r + e];
                    weight = exp2_flushed(weight * unit - base);
                    sum[r] += weight;
                }
        }
    }
};

// After the first steps most have no score that is larger than all before.
DEVICE void shrink(float (&sums)[COLUMN_TILES][4], const float (&factor)[2]) {
    if (factor[0] == 1.0f && factor[1] == 1.0f) return;
    EACH (n, COLUMN_TILES)
        EACH (e, 4) sums[n][e] *= factor[e / 2];
}

// gridDim = [ceil(queries / BLOCK_ROWS) * heads * batches], blockDim = [128], shared memory (BLOCK_ROWS + 4 KEYS) * (HEAD_DIM * sizeof(T) + 16)
// bytes. A block of queries walks the keys. `lse`: [B, H, T], contiguous. A query that sees no key gives zeros and
// -inf.
KERNEL void __launch_bounds__(THREADS, RESIDENT)
    attention(T* o, float* lse, const T* q, const T* k, const T* v, const T* mask, CONSTANT Heads o_at, CONSTANT Heads q_at,
              CONSTANT Heads k_at, CONSTANT Heads v_at, CONSTANT Mask mask_at, CONSTANT Sizes sizes, int causal, float scale
              PROGRAM_PARAMETER) {
    DYNAMIC_SHARED(memory);
    T* q_tile = first_tile(memory);
    T* k_tiles = q_tile + BLOCK_ROWS * TILE_ROW;
    T* v_tiles = k_tiles + 2 * KEYS * TILE_ROW;

    // The last queries first: with a causal mask they have most to do.
    int blocks = (sizes.queries + BLOCK_ROWS - 1) / BLOCK_ROWS, first = (blocks - 1 - (int)(blockIdx.x % blocks)) * BLOCK_ROWS;
    int line = blockIdx.x / blocks, head = line % sizes.heads, batch = line / sizes.heads, kv = head / sizes.group;
    k += batch * k_at.batch + kv * k_at.head;
    v += batch * v_at.batch + kv * v_at.head;
    if (mask) mask += batch * mask_at.batch + head * mask_at.head;
    copy_rows<BLOCK_ROWS>(q_tile, q + batch * q_at.batch + head * q_at.head, q_at.row, first, sizes.queries);

    int visible = causal && first + BLOCK_ROWS < sizes.keys ? first + BLOCK_ROWS : sizes.keys;
    int row = warp_row();
    Scores scores = SCORES(mask, batch, head);
    Online rows;
    EACH (r, 2) rows.top[r] = -infinity(0.0f), rows.sum[r] = 0.0f;
    float sums[COLUMN_TILES][4] = {}, factor[2];

    auto fetch = [&](int i, int stage) {
        copy_rows<KEYS>(k_tiles + stage * KEYS * TILE_ROW, k, k_at.row, i * KEYS, sizes.keys);
        copy_rows<KEYS>(v_tiles + stage * KEYS * TILE_ROW, v, v_at.row, i * KEYS, sizes.keys);
    };
    auto use = [&](int i, int stage) {
        int from = stage * KEYS * TILE_ROW;
        float s[KEYS / 8][4] = {};
        Tiles<T>::scores(s, q_tile, k_tiles + from);
        float unit = scores.apply<false>(s, first + row, i * KEYS);
        rows.weigh(s, unit, factor);
        shrink(sums, factor);
        Tiles<T>::weighted(sums, s, v_tiles + from);
    };
    pipeline((visible + KEYS - 1) / KEYS, fetch, use);

    float share[2];
    EACH (r, 2) {
        float sum = rows.sum[r];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        share[r] = sum == 0.0f ? 0.0f : 1.0f / sum;
        int query = first + row + row_of(2 * r);
        if (lane_column() == 0 && query < sizes.queries)
            lse[(i64)line * sizes.queries + query] = (finite_or_zero(rows.top[r]) + log2f(sum)) * LN_2;
    }
    store_rows(o + batch * o_at.batch + head * o_at.head, o_at.row, first + row, sizes.queries, sums, share);
}

// One pass of a stable radix sort of pairs (key, position) by four bits, lines [lines, n] at a time: count the digits per tile,
// turn the counts into positions, move. Four bits a pass: the order in a tile then needs one small table and no atomics. Defines:
// K (u32 or u64).
#include "common.cuh"

#define THREADS 256
#define ITEMS 8
#define TILE (THREADS * ITEMS)
#define DIGITS 16

DEVICE int digit(K key, int shift) { return (int)(key >> shift) & (DIGITS - 1); }

// How often each digit occurs in each thread's items of a tile.
DEVICE void count_items(u16 (&counts)[DIGITS][THREADS], const K* keys, i64 first, i64 n, int shift) {
    for (int d = 0; d < DIGITS; d++) counts[d][threadIdx.x] = 0;
    for (int k = 0; k < ITEMS; k++) {
        i64 i = first + k;
        if (i < n) counts[digit(keys[i], shift)][threadIdx.x]++;
    }
}

// gridDim = [tiles of 2048, lines], blockDim = [256]. `counts`: [lines, 16, tiles].
KERNEL void radix_count(u32* counts, const K* keys, i64 n, int shift) {
    __shared__ u16 table[DIGITS][THREADS];
    i64 line = blockIdx.y, tile = blockIdx.x;
    count_items(table, keys + line * n, tile * TILE + threadIdx.x * ITEMS, n, shift);
    __syncthreads();
    // 16 threads of a row each sum 16 threads' counts of one digit, then one of them sums those.
    int d = threadIdx.x / 16, part = threadIdx.x % 16;
    u32 sum = 0;
    for (int t = 0; t < 16; t++) sum += table[d][part * 16 + t];
    __syncthreads();
    table[d][part] = (u16)sum;
    __syncthreads();
    if (part > 0) return;
    sum = 0;
    for (int p = 0; p < 16; p++) sum += table[d][p];
    counts[(line * DIGITS + d) * gridDim.x + tile] = sum;
}

// gridDim = [lines], blockDim = [256]: in place, the sum of all counts before each, over the `entries` = 16 * tiles of a line.
KERNEL void radix_places(u32* counts, i64 entries) {
    u32* line = counts + blockIdx.x * entries;
    u32 carry = 0;
    for (i64 first = 0; first < entries; first += THREADS) {
        i64 i = first + threadIdx.x;
        Count mine = {i < entries ? line[i] : 0}, total;
        u32 before = block_before<THREADS>(mine, total).n;
        if (i < entries) line[i] = carry + before;
        carry += total.n;
    }
}

// gridDim = [tiles, lines], blockDim = [256]: moves the pairs.
KERNEL void radix_move(K* keys_to, u32* places_to, const K* keys, const u32* places, const u32* counts, i64 n, int shift) {
    __shared__ u16 table[DIGITS][THREADS];
    __shared__ u32 starts[DIGITS];
    i64 line = blockIdx.y, tile = blockIdx.x, first = tile * TILE + threadIdx.x * ITEMS;
    keys += line * n;
    places += line * n;
    count_items(table, keys, first, n, shift);
    __syncthreads();
    // The table in a row, digit by digit, becomes the sums of what precedes: 16 adjacent entries per thread.
    u16* flat = &table[0][0] + threadIdx.x * DIGITS;
    Count mine = {0}, total;
    for (int k = 0; k < DIGITS; k++) mine.n += flat[k];
    u32 before = block_before<THREADS>(mine, total).n;
    for (int k = 0; k < DIGITS; k++) {
        u32 here = flat[k];
        flat[k] = (u16)before;
        before += here;
    }
    __syncthreads();
    if (threadIdx.x < DIGITS) {
        int d = threadIdx.x;
        starts[d] = counts[(line * DIGITS + d) * gridDim.x + tile] - table[d][0];
    }
    __syncthreads();
    for (int k = 0; k < ITEMS; k++) {
        i64 i = first + k;
        if (i >= n) break;
        int d = digit(keys[i], shift);
        i64 to = line * n + (u32)(starts[d] + table[d][threadIdx.x]++);
        keys_to[to] = keys[i];
        places_to[to] = places[i];
    }
}

// Shared by every kernel: element types, strided walks, 16-byte packs, and reductions of a warp and of a block in a fixed order.
#ifndef WEFT_COMMON
#define WEFT_COMMON
#include "device.cuh"

#define WARP 32
#define ALL_LANES 0xffffffffu

// Bits of the word that tells the host of an index out of range, one per operation.
#define FLAG_GATHER 1
#define FLAG_SCATTER_ADD 2
#define FLAG_CROSS_ENTROPY 4

// A truth value, stored as a byte, added by `or`.
struct b8 {
    u8 bits;
};
// 16 bytes that are only moved.
struct alignas(16) v16 {
    u64 words[2];
};

// The layout of an operand: sizes and strides in elements, last axis innermost, strides of any sign.
struct Strided {
    i64 stride[8];
    int size[8];
    int rank;
};
static_assert(sizeof(Strided) == 104, "the launcher packs this structure");

// ---- Element types: as stored (`E`), and as computed in (`C`).

template <class E> struct Compute {
    typedef E type;
};
template <> struct Compute<f16> {
    typedef float type;
};
template <> struct Compute<bf16> {
    typedef float type;
};
template <> struct Compute<b8> {
    typedef bool type;
};

template <class E> DEVICE E load(E x) { return x; }
DEVICE float load(f16 x) { return widen(x); }
DEVICE float load(bf16 x) { return widen(x); }
DEVICE bool load(b8 x) { return x.bits != 0; }

template <class E> struct Store {
    static DEVICE E of(E x) { return x; }
};
template <> struct Store<f16> {
    static DEVICE f16 of(float x) { return to_f16(x); }
};
template <> struct Store<bf16> {
    static DEVICE bf16 of(float x) { return to_bf16(x); }
};
template <> struct Store<b8> {
    static DEVICE b8 of(bool x) {
        b8 y;
        y.bits = x;
        return y;
    }
};

// Integers wrap; signed ones by way of unsigned ones, whose overflow C++ defines.
template <class C> DEVICE C plus(C a, C b) { return a + b; }
DEVICE int plus(int a, int b) { return (int)((u32)a + (u32)b); }
DEVICE i64 plus(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
DEVICE bool plus(bool a, bool b) { return a || b; }
template <class C> DEVICE C times(C a, C b) { return a * b; }
DEVICE int times(int a, int b) { return (int)((u32)a * (u32)b); }
DEVICE i64 times(i64 a, i64 b) { return (i64)((u64)a * (u64)b); }

template <class C> DEVICE bool is_nan(C x) { return x != x; }
// The larger; NaN wins.
template <class C> DEVICE C larger(C a, C b) { return a >= b || is_nan(a) ? a : b; }
// The larger, in one instruction; NaN loses.
DEVICE float larger_number(float a, float b) { return fmaxf(a, b); }
DEVICE double larger_number(double a, double b) { return fmax(a, b); }

#define LOG2_E 1.4426950408889634f

DEVICE float infinity(float) { return __int_as_float(0x7f800000); }
DEVICE double infinity(double) { return __longlong_as_double(0x7ff0000000000000LL); }
DEVICE float not_a_number(float) { return __int_as_float(0x7fc00000); }
DEVICE double not_a_number(double) { return __longlong_as_double(0x7ff8000000000000LL); }
DEVICE float exponential(float x) { return expf(x); }
DEVICE double exponential(double x) { return exp(x); }
// e^x for what is summed with its largest term 1: next to that the rounding of x log2(e), and flushed terms, vanish.
DEVICE float weight_of_exponent(float x) { return exp2_flushed(x * LOG2_E); }
DEVICE double weight_of_exponent(double x) { return exp(x); }
DEVICE float logarithm(float x) { return logf(x); }
DEVICE double logarithm(double x) { return log(x); }
DEVICE float square_root(float x) { return sqrtf(x); }
DEVICE double square_root(double x) { return sqrt(x); }

// The value subtracted before an exponential: the largest, or 0 where it is infinite (a row of -inf has no weight at all).
template <class C> DEVICE C finite_or_zero(C top) { return top == infinity(C()) || top == -infinity(C()) ? C(0) : top; }

// An unsigned integer whose order is the order of the values: equal values have equal keys, NaN the largest.
DEVICE u32 sort_key(float x) {
    if (is_nan(x)) return ~0u;
    u32 bits = (u32)__float_as_int(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
DEVICE u64 sort_key(double x) {
    if (is_nan(x)) return ~0ull;
    u64 bits = (u64)__double_as_longlong(x + 0.0);
    return bits >> 63 ? ~bits : bits | 0x8000000000000000ull;
}
DEVICE u32 sort_key(int x) { return (u32)x ^ 0x80000000u; }
DEVICE u64 sort_key(i64 x) { return (u64)x ^ 0x8000000000000000ull; }
DEVICE u32 sort_key(u32 x) { return x; }
DEVICE u32 sort_key(u8 x) { return x; }

// ---- Walks.

// `i / size`, neither negative. Most launches have fewer than 2^31 positions: 32-bit divisions are several times as fast.
DEVICE i64 quotient(i64 i, i64 size) { return (i | size) <= 0x7fffffff ? (i64)((u32)i / (u32)size) : i / size; }

// Offsets of position `i` in up to three operands of `a`'s sizes.
template <int N> DEVICE void locate(i64 i, i64 (&at)[N], const Strided& a, const Strided& b, const Strided& c) {
    for (int k = 0; k < N; k++) at[k] = 0;
    for (int d = a.rank - 1; d >= 0; d--) {
        i64 rest = d == 0 ? 0 : quotient(i, a.size[d]);
        i64 p = i - rest * a.size[d];
        if (N > 0) at[0] += p * a.stride[d];
        if (N > 1) at[1] += p * b.stride[d];
        if (N > 2) at[2] += p * c.stride[d];
        i = rest;
    }
}
DEVICE i64 locate(i64 i, const Strided& a) {
    i64 at[1];
    locate<1>(i, at, a, a, a);
    return at[0];
}

DEVICE i64 global_thread() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE i64 global_threads() { return (i64)gridDim.x * blockDim.x; }

// `N` adjacent elements, moved as one; 16 bytes of them where `VECTOR` is defined as 1.
template <class E, int N> struct alignas(sizeof(E) * N) Pack {
    E at[N];
};
#define VEC (VECTOR ? 16 / (int)sizeof(T) : 1)

// Moved as a built-in type: of a structure the compiler makes single elements again.
template <int BYTES> struct Word;
template <> struct Word<16> {
    typedef uint4 type;
};
template <> struct Word<8> {
    typedef uint2 type;
};
template <> struct Word<4> {
    typedef u32 type;
};
template <> struct Word<2> {
    typedef u16 type;
};

// Half-precision elements in pairs: one conversion, and words that stay together.
template <int N, class E> DEVICE void fill_pairs(Pack<E, N>& pack, const float (&from)[N]) {
    for (int i = 0; i + 1 < N; i += 2) ((u32*)pack.at)[i / 2] = pack2(from[i], from[i + 1], E());
    if (N % 2 == 1) pack.at[N - 1] = Store<E>::of(from[N - 1]);
}

// How a pack's elements are converted.
template <class E> struct Packing {
    template <int N, class C> static DEVICE void read(C (&to)[N], const Pack<E, N>& pack) {
        for (int i = 0; i < N; i++) to[i] = load(pack.at[i]);
    }
    template <int N, class C> static DEVICE void fill(Pack<E, N>& pack, const C (&from)[N]) {
        for (int i = 0; i < N; i++) pack.at[i] = Store<E>::of(from[i]);
    }
};

template <> struct Packing<f16> {
    template <int N> static DEVICE void read(float (&to)[N], const Pack<f16, N>& pack) {
        for (int i = 0; i < N; i++) to[i] = load(pack.at[i]);
    }
    template <int N> static DEVICE void fill(Pack<f16, N>& pack, const float (&from)[N]) { fill_pairs(pack, from); }
};

template <> struct Packing<bf16> {
    // Either of a pair is one instruction away from an f32; from a 16-bit integer it would be two.
    template <int N> static DEVICE void read(float (&to)[N], const Pack<bf16, N>& pack) {
        for (int i = 0; i + 1 < N; i += 2) {
            u32 pair = ((const u32*)pack.at)[i / 2];
            to[i] = __int_as_float((int)(pair << 16));
            to[i + 1] = __int_as_float((int)(pair & 0xffff0000u));
        }
        if (N % 2 == 1) to[N - 1] = load(pack.at[N - 1]);
    }
    template <int N> static DEVICE void fill(Pack<bf16, N>& pack, const float (&from)[N]) { fill_pairs(pack, from); }
};

template <int N, class E, class C, class W> DEVICE void unpack(C (&to)[N], const W& word) {
    Pack<E, N> pack;
    *(W*)&pack = word;
    Packing<E>::read(to, pack);
}

template <int N, class E, class C> DEVICE void load_pack(C (&to)[N], const E* from) {
    typedef typename Word<sizeof(Pack<E, N>)>::type W;
    unpack<N, E>(to, *(const W*)from);
}

template <int N, class E, class C> DEVICE void store_pack(E* to, const C (&from)[N]) {
    typedef typename Word<sizeof(Pack<E, N>)>::type W;
    Pack<E, N> pack;
    Packing<E>::fill(pack, from);
    if constexpr (sizeof(W) == 16)
        store16(to, *(const W*)&pack);
    else
        *(W*)to = *(const W*)&pack;
}

// Which of `N` adjacent elements belong to a row: all, except at its ends.
template <int N> struct Part {
    int first, end;

    DEVICE bool whole() const { return first == 0 && end == N; }
    DEVICE bool has(int k) const { return k >= first && k < end; }

    // Elements outside of the row become `none`. Operands are aligned as the row that is walked.
    template <class E, class C> DEVICE void load(C (&to)[N], const E* from, C none) const {
        if (whole()) return load_pack(to, from);
        for (int k = 0; k < N; k++) to[k] = has(k) ? ::load(from[k]) : none;
    }

    // From any alignment: a row's parameters are aligned differently from the row.
    template <class E, class C> DEVICE void load_any(C (&to)[N], const E* from, C none) const {
        if (whole() && (u64)from % sizeof(Pack<E, N>) == 0) return load_pack(to, from);
        for (int k = 0; k < N; k++) to[k] = has(k) ? ::load(from[k]) : none;
    }

    template <class E, class C> DEVICE void store(E* to, const C (&from)[N]) const {
        if (whole()) return store_pack(to, from);
        for (int k = 0; k < N; k++)
            if (has(k)) to[k] = Store<E>::of(from[k]);
    }
};

// ---- Reductions. Butterflies: every lane combines the same pairs, so all end with the same bits.

template <class C> struct Plus {
    static DEVICE C of(C a, C b) { return a + b; }
};
template <class C> struct Larger {
    static DEVICE C of(C a, C b) { return larger(a, b); }
};

template <class Op, class C> DEVICE C warp_all(C x) {
    for (int d = WARP / 2; d > 0; d /= 2) x = Op::of(x, __shfl_xor_sync(ALL_LANES, x, d));
    return x;
}

// `threads` cooperate on a row: a warp (blockDim = [32, rows]), or a block of a whole number of warps (blockDim = [threads]).
template <int COUNT> struct Row {
    static const int THREADS = COUNT;

    static DEVICE i64 index() { return THREADS == WARP ? (i64)blockIdx.x * blockDim.y + threadIdx.y : (i64)blockIdx.x; }
    static DEVICE int thread() { return threadIdx.x; }

    // Calls f(i, part) for every 16 aligned bytes of a row, elements i .. i + N, until all threads together had all `width`
    // elements. The row may begin anywhere: its ends are parts.
    template <int N, class E, class F> static DEVICE void walk(const E* row, i64 width, F f) {
        int before = N == 1 ? 0 : (int)((u64)row % 16 / sizeof(E));
        i64 end = before + width, packs = end / N;
        if (before > 0 && thread() == 0) f((i64)-before, Part<N>{before, end < N ? (int)end : N});
        for (i64 k = thread() + (before > 0); k < packs; k += THREADS) f(k * N - before, Part<N>{0, N});
        if (end % N > 0 && (packs > 0 || before == 0) && thread() == THREADS - 1) f(packs * N - before, Part<N>{0, (int)(end % N)});
    }

    // Combines one value of every thread; all get the result. `none` changes nothing.
    template <class Op, class C> static DEVICE C all(C x, C none) {
        x = warp_all<Op>(x);
        if (THREADS == WARP) return x;
        __shared__ C parts[THREADS / WARP];
        if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = x;
        __syncthreads();
        x = threadIdx.x % WARP < THREADS / WARP ? parts[threadIdx.x % WARP] : none;
        __syncthreads();
        return warp_all<Op>(x);
    }

    template <class C> static DEVICE C sum(C x) { return all<Plus<C>>(x, C(0)); }

    // Two sums in one exchange: a block waits for its warps once.
    template <class C> static DEVICE void sums(C& a, C& b) {
        a = warp_all<Plus<C>>(a);
        b = warp_all<Plus<C>>(b);
        if (THREADS == WARP) return;
        __shared__ C parts[2][THREADS / WARP];
        int lane = threadIdx.x % WARP;
        if (lane == 0) parts[0][threadIdx.x / WARP] = a, parts[1][threadIdx.x / WARP] = b;
        __syncthreads();
        a = lane < THREADS / WARP ? parts[0][lane] : C(0);
        b = lane < THREADS / WARP ? parts[1][lane] : C(0);
        __syncthreads();
        a = warp_all<Plus<C>>(a);
        b = warp_all<Plus<C>>(b);
    }

    template <class C> static DEVICE C max(C x) { return all<Larger<C>>(x, -infinity(C())); }
};

// A running sum of exponentials and the largest exponent (Milakov & Gimelshein 2018).
template <class C> struct Exponentials {
    C top, sum;

    static DEVICE Exponentials none() {
        Exponentials e = {-infinity(C()), C(0)};
        return e;
    }

    // Adds `N` values at once: one rescaling for all of them. NaN reaches the sum.
    template <int N> DEVICE void add(const C (&x)[N]) {
        C before = finite_or_zero(top);
        for (int i = 0; i < N; i++) top = larger_number(top, x[i]);
        C base = finite_or_zero(top);
        // A sum of nothing stays 0, however low the new base is.
        if (base != before && sum != C(0)) sum *= weight_of_exponent(before - base);
        for (int i = 0; i < N; i++) sum += weight_of_exponent(x[i] - base);
    }

    // Joins all threads' parts of a row.
    template <int THREADS> DEVICE void join() {
        C all = Row<THREADS>::max(top);
        if (sum != C(0)) sum *= weight_of_exponent(finite_or_zero(top) - finite_or_zero(all));
        sum = Row<THREADS>::sum(sum);
        top = is_nan(sum) ? sum : all;
    }
};

// A row that is read several times by the threads of `Group`. They read it once and hold it, in `COUNT` 16-byte packs each; it then begins at
// a multiple of 16 bytes, and is whole packs. With a `COUNT` of 0 they read it again each time, from cache.
template <class Group, class E, int N, int COUNT> struct HeldRow {
    i64 width;
    uint4 packs[COUNT];

    // A row that is not `wanted` is not read.
    DEVICE HeldRow(const E* row, i64 width, bool wanted = true) : width(width) {
        for (int j = 0; j < COUNT; j++)
            if (wanted && has(j)) packs[j] = *(const uint4*)(row + at(j));
    }

    // Pack `j` of this thread has the elements from here on.
    static DEVICE int at(int j) { return (j * Group::THREADS + Group::thread()) * N; }
    // Only the last can be missing.
    DEVICE bool has(int j) const { return j + 1 < COUNT || at(j) < width; }
    template <class C> DEVICE void get(int j, C (&to)[N]) const { unpack<N, E>(to, packs[j]); }

    // Calls f(i, part, elements), where elements that the row does not have are `none`.
    template <class C, class F> DEVICE void each(C, F f) const {
        for (int j = 0; j < COUNT; j++) {
            if (!has(j)) continue;
            C in[N];
            get(j, in);
            f((i64)at(j), Part<N>{0, N}, in);
        }
    }
};

template <class Group, class E, int N> struct HeldRow<Group, E, N, 0> {
    const E* row;
    i64 width;

    DEVICE HeldRow(const E* row, i64 width) : row(row), width(width) {}

    template <class C, class F> DEVICE void each(C none, F f) const {
        Group::template walk<N>(row, width, [&](i64 i, Part<N> part) {
            C in[N];
            part.load(in, row + i, none);
            f(i, part, in);
        });
    }
};

// ---- Scans of a block. `S` has `none()`, `then(a, b)` (a before b) and `up(d)`, that of the lane `d` before.

// Everything before this thread's `x`; `total` becomes everything.
template <int THREADS, class S> DEVICE S block_before(S x, S& total) {
    __shared__ S parts[THREADS / WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    S upto = x;
    for (int d = 1; d < WARP; d *= 2) {
        S other = upto.up(d);
        if (lane >= d) upto = S::then(other, upto);
    }
    if (lane == WARP - 1) parts[warp] = upto;
    __syncthreads();
    S before = S::none();
    total = S::none();
    for (int w = 0; w < THREADS / WARP; w++) {
        if (w == warp) before = total;
        total = S::then(total, parts[w]);
    }
    __syncthreads();
    S own = upto.up(1);
    return lane == 0 ? before : S::then(before, own);
}

// Sums.
struct Count {
    u32 n;
    static DEVICE Count none() {
        Count c = {0};
        return c;
    }
    static DEVICE Count then(Count a, Count b) {
        Count c = {a.n + b.n};
        return c;
    }
    DEVICE Count up(int d) const {
        Count c = {__shfl_up_sync(ALL_LANES, n, d)};
        return c;
    }
};

#endif

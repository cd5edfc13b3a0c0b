// Everything that is not plain C++: kernel linkage, conversions of f16 and bf16, tensor cores, asynchronous copies.
// Nothing else contains PTX.
#ifndef WEFT_DEVICE
#define WEFT_DEVICE

#define KERNEL extern "C" __global__
#define DEVICE __device__ __forceinline__
// A parameter that is read in place: indexed at run time, an ordinary one would be copied to the stack of every thread.
#define CONSTANT const __grid_constant__
// The launch's dynamic shared memory; 16-byte vectors may start at its front.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

DEVICE float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

DEVICE f16 to_f16(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

DEVICE float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

DEVICE bf16 to_bf16(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// Two half-precision elements in one register, `low` in the lower bits.
DEVICE u32 pack2(float low, float high, f16) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

DEVICE u32 pack2(float low, float high, bf16) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// 16 bytes to global memory in one instruction: left to itself the compiler stores the parts of what it has just packed one by one.
// It clobbers no memory, so that loads of later steps may go first: no launch reads what it stores this way.
DEVICE void store16(void* to, const uint4& x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w));
}

// 2^x in one instruction, to two units of the last place; results below 2^-126 are zero.
DEVICE float exp2_flushed(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Four 8x8 matrices of 16-bit elements: lane 8m + r gives the address of row r of matrix m; lane l receives elements
// 2(l % 4) and 2(l % 4) + 1 of row l / 4 of each.
DEVICE void load_matrices(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Loads matrices like the function above, each transposed.
DEVICE void load_matrices_transposed(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// c += a b for a 16x16 (rows) and b 16x8 (columns), spread over a warp as the PTX manual's figures of m16n8k16 show. With g = lane
// / 4, t = lane % 4: a holds rows g, g + 8 at columns 2t, 2t + 1 (a[0], a[1]) and 2t + 8, 2t + 9 (a[2], a[3]); b rows 2t, 2t + 1
// (b0) and 2t + 8, 2t + 9 (b1) of column g; c rows g (c[0], c[1]) and g + 8 (c[2], c[3]) at columns 2t, 2t + 1.
DEVICE void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, f16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Products of a warpgroup: 64 rows, 16 of each of its warps, whose results are spread over a warp as those of m16n8k16, eight columns
// after eight. Tiles in shared memory have rows of 64 halves; of eight rows each, which begin at a multiple of 1024 bytes, words of
// 16 bytes are permuted by the number of the row (swizzle of 128 bytes).

// The descriptor of a tile: its first address, and 1024 bytes from eight rows to the next.
DEVICE u64 tile_descriptor(const void* tile) {
    return (u64)(shared_address(tile) >> 4 & 0x3fff) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// That of a tile so many halves behind.
DEVICE u64 tile_behind(u64 descriptor, int halves) { return descriptor + halves / 8; }

// Writes to shared memory become visible to products of threads that are behind a barrier.
DEVICE void products_see_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Registers that products read or write are handed over.
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void products_wait() {
    asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Keeps what reads results behind the wait, and what wrote them before the products.
template <int N> DEVICE void hold(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
}

DEVICE void hold(u32 (&a)[4]) { asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory"); }

#define TILE_OF(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define TILES_OF_32 TILE_OF(c, 0), TILE_OF(c, 1), TILE_OF(c, 2), TILE_OF(c, 3)
#define TILES_OF_64 TILES_OF_32, TILE_OF(c, 4), TILE_OF(c, 5), TILE_OF(c, 6), TILE_OF(c, 7)
#define NAMES_OF_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_OF_64 NAMES_OF_32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PRODUCT(columns, kind, names, rest) \
    "{\n\t.reg .pred adds;\n\tsetp.ne.b32 adds, 1, 0;\n\twgmma.mma_async.sync.aligned.m64n" columns "k16.f32." kind "." kind " {" names \
    "}, " rest ";\n\t}"

#define PRODUCTS(T, kind)                                                                                                    \
    /* c += a b^T of 16 columns of both tiles. */                                                                          \
    DEVICE void product(float (&c)[8][4], u64 a, u64 b, T) {                                                               \
        asm volatile(PRODUCT("64", kind, NAMES_OF_64, "%32, %33, adds, 1, 1, 0, 0") : TILES_OF_64 : "l"(a), "l"(b));          \
    }                                                                                                                       \
    DEVICE void product(float (&c)[4][4], u64 a, u64 b, T) {                                                               \
        asm volatile(PRODUCT("32", kind, NAMES_OF_32, "%16, %17, adds, 1, 1, 0, 0") : TILES_OF_32 : "l"(a), "l"(b));          \
    }                                                                                                                       \
    /* c += a b of 16 columns in registers, and 16 rows of a tile. */                                                      \
    DEVICE void product(float (&c)[8][4], const u32 (&a)[4], u64 b, T) {                                                   \
        asm volatile(PRODUCT("64", kind, NAMES_OF_64, "{%32, %33, %34, %35}, %36, adds, 1, 1, 1")                             \
                     : TILES_OF_64                                                                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                 \
    }
PRODUCTS(f16, "f16")
PRODUCTS(bf16, "bf16")
#else
DEVICE void products_see_writes() {}
#endif

// Starts copying 16 bytes to shared memory, or writing 16 zero bytes when `wanted` is false; `from` is then not read.
DEVICE void copy_async16(void* to, const void* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(wanted ? 16 : 0)
                 : "memory");
}

// Ends a group of this thread's copies.
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's groups. Other threads' copies need a barrier after it.
DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

#endif

// Functions that printed programs call, and the storage of elements. No header is included, so the compiler alone is enough:
// f16 and bf16 are their bits, converted here.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define WG_FN static __device__ __forceinline__

// Stored forms that are not a C type of their own.
struct wg_half { u16 bits; };
struct wg_bfloat { u16 bits; };
struct wg_truth { u8 bits; };

WG_FN float wg_from_half(u16 h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}
WG_FN u16 wg_to_half(float x) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
WG_FN u16 wg_to_bfloat(float x) {
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
WG_FN float wg_from_bfloat(u16 h) { return __int_as_float((int)((u32)h << 16)); }

// Loads upcast, stores round.
template <class T> WG_FN T wg_load(T x) { return x; }
WG_FN float wg_load(wg_half x) { return wg_from_half(x.bits); }
WG_FN float wg_load(wg_bfloat x) { return wg_from_bfloat(x.bits); }
WG_FN bool wg_load(wg_truth x) { return x.bits != 0; }
template <class T> WG_FN void wg_store(T &to, T x) { to = x; }
WG_FN void wg_store(wg_half &to, float x) { to.bits = wg_to_half(x); }
WG_FN void wg_store(wg_bfloat &to, float x) { to.bits = wg_to_bfloat(x); }
WG_FN void wg_store(wg_truth &to, bool x) { to.bits = x; }

// V adjacent elements at once.
template <class T, int V> struct alignas(sizeof(T) * V) wg_pack { T at[V]; };
template <class T, int V> WG_FN wg_pack<T, V> wg_read(const T *from, int count) {
    if (V == 1 || count == V) return *(const wg_pack<T, V> *)from;
    wg_pack<T, V> pack = {};
    for (int i = 0; i < count; i++) pack.at[i] = from[i];
    return pack;
}
template <class T, int V> WG_FN void wg_write(T *to, const wg_pack<T, V> &pack, int count) {
    if (V == 1 || count == V) {
        *(wg_pack<T, V> *)to = pack;
        return;
    }
    for (int i = 0; i < count; i++) to[i] = pack.at[i];
}

// n / d for n < 2^31 (Granlund & Montgomery 1994); d >= 1.
WG_FN u32 wg_divide(u32 n, u32 magic, u32 shift) { return (__umulhi(n, magic) + n) >> shift; }

// Combining.
WG_FN bool wg_plus(bool a, bool b) { return a | b; }
WG_FN float wg_plus(float a, float b) { return a + b; }
WG_FN double wg_plus(double a, double b) { return a + b; }
WG_FN int wg_plus(int a, int b) { return (int)((u32)a + (u32)b); }
WG_FN i64 wg_plus(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
WG_FN u32 wg_plus(u32 a, u32 b) { return a + b; }
WG_FN u8 wg_plus(u8 a, u8 b) { return (u8)(a + b); }
WG_FN bool wg_times(bool a, bool b) { return a & b; }
WG_FN float wg_times(float a, float b) { return a * b; }
WG_FN double wg_times(double a, double b) { return a * b; }
WG_FN int wg_times(int a, int b) { return (int)((u32)a * (u32)b); }
WG_FN i64 wg_times(i64 a, i64 b) { return (i64)((u64)a * (u64)b); }
WG_FN u32 wg_times(u32 a, u32 b) { return a * b; }
WG_FN u8 wg_times(u8 a, u8 b) { return (u8)(a * b); }

// Element functions. NaN wins in both extremes; of two equal values the second is returned, as by the reference.
template <class T> WG_FN T wg_max(T a, T b) { return (a > b || a != a) ? a : b; }
template <class T> WG_FN T wg_min(T a, T b) { return (a < b || a != a) ? a : b; }
WG_FN float wg_sign(float x) { return x == 0.0f || x != x ? fabsf(x) : copysignf(1.0f, x); }
WG_FN double wg_sign(double x) { return x == 0.0 || x != x ? fabs(x) : copysign(1.0, x); }
template <class T> WG_FN T wg_sign(T x) { return (T)((x > 0) - (x < (T)0)); }
WG_FN int wg_abs(int x) { return x < 0 ? (int)(0 - (u32)x) : x; }
WG_FN i64 wg_abs(i64 x) { return x < 0 ? (i64)(0 - (u64)x) : x; }
template <class T> WG_FN T wg_abs(T x) { return x; }
// The library's power of two of a float errs by more than 2 units of the last place. Beyond the clamps all is 0 or infinity.
WG_FN float wg_exp2(float x) {
    float c = x > 160.0f ? 160.0f : x < -200.0f ? -200.0f : x, whole = rintf(c);
    return ldexpf(expf((c - whole) * 0.693147182f), (int)whole);
}
WG_FN double wg_exp2(double x) { return exp2(x); }
// The library's tangent of a float errs by up to 4 units of the last place.
WG_FN float wg_tan(float x) { return (float)tan((double)x); }
WG_FN double wg_tan(double x) { return tan(x); }
// exp(-x²) s p(t) with t = (x - 3) / (x + 3) and s = 1 - t (Shepherd & Laframboise 1981), within 7 units of the last place. GELU is
// bounded by instructions: with this function an element of bf16 takes 42, with the library's, within 4 units, 55.
WG_FN float wg_erfc(float x) {
    float a = wg_min(10.1f, fabsf(x)), r, power;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a + 3.0f));
    float t = (a - 3.0f) * r;
    t = fmaf(r, fmaf(-t, a, fmaf(t + 1.0f, -3.0f, a)), t);
    float p = fmaf(fmaf(-5.5671633e-05f, t, -8.327932e-05f), t, 0.0005129282f);
    p = fmaf(fmaf(p, t, -0.00020281963f), t, -0.0044727405f);
    p = fmaf(fmaf(p, t, 0.019921213f), t, -0.05174444f);
    p = fmaf(fmaf(fmaf(p, t, 0.0983714f), t, -0.14723241f), t, 0.17900115f);
    // The square, and its product with -log2(e), each with the rest that rounding leaves.
    float square = a * a, high = square * -1.44269502f;
    float low = fmaf(square, -1.92596303e-08f, fmaf(square, -1.44269502f, -high));
    low = fmaf(fmaf(a, a, -square), -1.44269502f, low);
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(high));
    float y = fmaf(power, low * 0.693147182f, power) * ((1.0f - t) * p);
    return x < 0.0f ? 2.0f - y : y;
}
WG_FN double wg_erfc(double x) { return erfc(x); }

WG_FN int wg_div(int a, int b) { return b == 0 ? 0 : b == -1 ? (int)(0 - (u32)a) : a / b; }
WG_FN i64 wg_div(i64 a, i64 b) { return b == 0 ? 0 : b == -1 ? (i64)(0 - (u64)a) : a / b; }
template <class T> WG_FN T wg_div(T a, T b) { return b == 0 ? (T)0 : (T)(a / b); }
WG_FN float wg_rem(float a, float b) {
    float r = fmodf(a, b);
    return r != 0.0f && (r < 0.0f) != (b < 0.0f) ? r + b : r;
}
WG_FN double wg_rem(double a, double b) {
    double r = fmod(a, b);
    return r != 0.0 && (r < 0.0) != (b < 0.0) ? r + b : r;
}
template <class T> WG_FN T wg_signed_rem(T a, T b) {
    T r = b == 0 || b == -1 ? 0 : a % b;
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
WG_FN int wg_rem(int a, int b) { return wg_signed_rem(a, b); }
WG_FN i64 wg_rem(i64 a, i64 b) { return wg_signed_rem(a, b); }
template <class T> WG_FN T wg_rem(T a, T b) { return b == 0 ? (T)0 : (T)(a % b); }
template <class T, class U> WG_FN T wg_power(T a, U left) {
    T result = 1, square = a;
    for (; left > 0; left >>= 1) {
        if (left & 1) result = wg_times(square, result);
        square = wg_times(square, square);
    }
    return result;
}
template <class T> WG_FN T wg_signed_pow(T a, T b) {
    if (b >= 0) return wg_power(a, b);
    return a == 1 ? 1 : a == -1 ? (b & 1 ? -1 : 1) : 0;
}
WG_FN int wg_pow(int a, int b) { return wg_signed_pow(a, b); }
WG_FN i64 wg_pow(i64 a, i64 b) { return wg_signed_pow(a, b); }
template <class T> WG_FN T wg_pow(T a, T b) { return wg_power(a, b); }
WG_FN int wg_shl(int a, int b) { return (int)((u32)a << (b & 31)); }
WG_FN i64 wg_shl(i64 a, i64 b) { return (i64)((u64)a << (b & 63)); }
template <class T> WG_FN T wg_shl(T a, T b) { return (T)(a << (b & (8 * sizeof(T) - 1))); }
template <class T> WG_FN T wg_shr(T a, T b) { return (T)(a >> (b & (8 * sizeof(T) - 1))); }

// Casts of floats: truncate, saturate, NaN is 0; to f16 or bf16, round and upcast again.
template <class F> WG_FN int wg_i32(F x) {
    return x != x ? 0 : x >= (F)2147483648.0 ? 2147483647 : x < (F)-2147483648.0 ? -2147483647 - 1 : (int)x;
}
template <class F> WG_FN i64 wg_i64(F x) {
    return x != x                            ? 0
           : x >= (F)9223372036854775808.0   ? 9223372036854775807ll
           : x < (F)-9223372036854775808.0 ? -9223372036854775807ll - 1
                                             : (i64)x;
}
template <class F> WG_FN u32 wg_u32(F x) { return !(x > 0) ? 0u : x >= (F)4294967296.0 ? 4294967295u : (u32)x; }
template <class F> WG_FN u8 wg_u8(F x) { return !(x > 0) ? (u8)0 : x >= (F)256.0 ? (u8)255 : (u8)(u32)x; }
WG_FN float wg_f16(float x) { return wg_from_half(wg_to_half(x)); }
WG_FN float wg_bf16(float x) { return wg_from_bfloat(wg_to_bfloat(x)); }

// Philox4x32-10 (Salmon et al. 2011): word index % 4 of counter (index / 4, stream, 0).
WG_FN u32 wg_random(u64 seed, u32 stream, i64 index) {
    u64 block = (u64)index / 4;
    u32 a = (u32)block, b = (u32)(block >> 32), c = stream, d = 0, k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 p0 = (u64)a * 0xD2511F53u, p1 = (u64)c * 0xCD9E8D57u;
        a = (u32)(p1 >> 32) ^ b ^ k0;
        b = (u32)p1;
        c = (u32)(p0 >> 32) ^ d ^ k1;
        d = (u32)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    u32 word = (u32)index & 3;
    return word == 0 ? a : word == 1 ? b : word == 2 ? c : d;
}

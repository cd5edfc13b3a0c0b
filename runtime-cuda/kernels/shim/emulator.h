// Runs the kernels on the CPU, one fiber per CUDA thread: replaces `device.cuh`.
//
// A fiber runs until it waits: at a barrier of its block, or in a warp's exchange (shuffles, matrix loads, tensor cores) until all
// 32 lanes are there. It detects: absent lanes, lanes in different exchanges, threads that leave before a barrier, deadlocks,
// shared memory read before it is written (it starts as NaN) or written beyond its end, asynchronous copies read before they were
// waited for (the copy happens at the wait; until then it reads NaN). A missing barrier shows if some order of the threads
// gives a wrong result: every launch runs in three orders.
#pragma once
#define WEFT_DEVICE

#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>
#include <ucontext.h>
#include <vector>

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
struct dim3 {
    u32 x, y, z;
    dim3(u32 x = 1, u32 y = 1, u32 z = 1) : x(x), y(y), z(z) {}
};

struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};

#define KERNEL [[maybe_unused]] static
#define DEVICE inline
#define CONSTANT const
#define __shared__ static
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(name) unsigned char* name = emulator::block.shared

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

[[noreturn]] inline void fail(const char* why) {
    fprintf(stderr, "emulator: %s (block %u %u %u, thread %u %u %u)\n", why, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
            threadIdx.y, threadIdx.z);
    abort();
}

enum Exchange { NONE, XOR, UP, DOWN, INDEX, MATRICES, MMA };
struct Copy {
    void* to;
    const void* from;
    bool wanted;
};

struct Fiber {
    ucontext_t start;
    jmp_buf at;
    dim3 index;
    bool begun, done;
    long barriers, exchanges;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> copies;
};

// Two rounds of values: a lane is at most one exchange ahead of another.
struct Warp {
    long complete;
    int arrived;
    Exchange kind;
    int detail;
    alignas(16) u8 values[2][32][64];
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<u8> memory;
    u8* shared;
    size_t size;
    int threads, arrived, live, current;
    long complete;
    jmp_buf scheduler;
    const std::function<void()>* kernel;
};
inline Block block;

inline Fiber& self() { return block.fibers[block.current]; }

inline void yield() {
    if (!_setjmp(self().at)) _longjmp(block.scheduler, 1);
}

inline void entry() {
    (*block.kernel)();
    Fiber& me = self();
    for (auto& group : me.groups)
        if (!group.empty()) fail("a thread ended with copies under way");
    if (!me.copies.empty()) fail("a thread ended with copies in no group");
    me.done = true;
    block.live--;
    _longjmp(block.scheduler, 1);
}

inline bool runnable(const Fiber& f, int i) {
    return !f.done && f.barriers <= block.complete && f.exchanges <= block.warps[i / 32].complete;
}

inline void resume(int i) {
    static ucontext_t scheduler;
    block.current = i;
    Fiber& f = self();
    threadIdx = f.index;
    if (_setjmp(block.scheduler)) return;
    if (f.begun) _longjmp(f.at, 1);
    f.begun = true;
    swapcontext(&scheduler, &f.start);
}

inline void barrier() {
    Fiber& me = self();
    if (block.live < block.threads) fail("a barrier that some threads left before");
    me.barriers++;
    if (++block.arrived == block.threads) {
        block.arrived = 0;
        block.complete++;
        return;
    }
    yield();
}

// Gives all lanes' values to every lane, which all must call this with the same kind and detail.
template <class V> const V* exchange(Exchange kind, int detail, const V& mine) {
    static_assert(sizeof(V) <= 64, "a value too large for the slots");
    Fiber& me = self();
    Warp& warp = block.warps[block.current / 32];
    if (warp.arrived == 0) warp.kind = kind, warp.detail = detail;
    if (warp.kind != kind || warp.detail != detail) fail("lanes of a warp in different exchanges");
    long round = me.exchanges++;
    memcpy(warp.values[round % 2][block.current % 32], &mine, sizeof(V));
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        warp.complete++;
    } else {
        yield();
    }
    static V all[32];
    for (int i = 0; i < 32; i++) memcpy(&all[i], warp.values[round % 2][i], sizeof(V));
    return all;
}

// All lanes of a warp once; whether any could run.
inline bool advance(int warp, int order) {
    bool any = false;
    for (int k = 0; k < 32; k++) {
        int i = warp * 32 + (order == 0 ? k : order == 1 ? 31 - k : (k * 13 + 5) % 32);
        if (!runnable(block.fibers[i], i)) continue;
        any = true;
        resume(i);
    }
    return any;
}

// Forwards, and backwards, all warps keep step; in the third order a warp runs on until a barrier of the block stops it.
inline bool sweep(int order) {
    bool any = false;
    int warps = block.threads / 32;
    for (int w = 0; w < warps; w++) {
        int warp = order == 1 ? warps - 1 - w : w;
        while (advance(warp, order)) {
            any = true;
            if (order != 2) break;
        }
    }
    return any;
}

inline void run_block(int order) {
    static const size_t STACK = 1 << 16;
    static std::vector<u8> stacks;
    if (stacks.size() < block.threads * STACK) stacks.resize(block.threads * STACK);
    memset(block.memory.data(), 0xff, block.memory.size());
    if (block.fibers.size() != (size_t)block.threads) block.fibers.resize(block.threads);
    if (block.threads % 32) fail("a block that is no whole number of warps");
    block.warps.assign(block.threads / 32, Warp());
    block.arrived = 0, block.live = block.threads, block.complete = 0;
    for (int i = 0; i < block.threads; i++) {
        Fiber& f = block.fibers[i];
        f.index = dim3(i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y);
        f.begun = f.done = false;
        f.barriers = f.exchanges = 0;
        f.groups.clear(), f.copies.clear();
        getcontext(&f.start);
        f.start.uc_stack.ss_sp = stacks.data() + i * STACK;
        f.start.uc_stack.ss_size = STACK;
        f.start.uc_link = nullptr;
        makecontext(&f.start, entry, 0);
    }
    while (block.live > 0) {
        if (!sweep(order)) fail("deadlock: threads wait for an exchange or a barrier that not all reach");
    }
    for (size_t i = block.size; i < block.size + 256; i++)
        if (block.shared[i] != 0xff) fail("a write beyond the launch's shared memory");
}

inline int orders = 3;

// A launch; the kernel's call is `call`. Each launch runs in the given order of threads.
inline void launch(int order, dim3 grid, dim3 threads, size_t shared, const std::function<void()>& call) {
    block.memory.assign(shared + 512, 0xff);
    block.size = shared;
    block.shared = (u8*)(((uintptr_t)block.memory.data() + 127) & ~(uintptr_t)127);
    block.threads = threads.x * threads.y * threads.z;
    block.kernel = &call;
    gridDim = grid, blockDim = threads;
    if (grid.y > 65535 || grid.z > 65535 || block.threads > 1024) fail("a launch beyond the device's limits");
    for (u32 z = 0; z < grid.z; z++)
        for (u32 y = 0; y < grid.y; y++)
            for (u32 x = 0; x < grid.x; x++) {
                blockIdx = dim3(x, y, z);
                run_block(order);
            }
}

}  // namespace emulator

inline void __syncthreads() { emulator::barrier(); }
inline void __syncwarp() { emulator::exchange(emulator::NONE, 0, 0); }
template <class V> V __shfl_xor_sync(u32 mask, V x, int d) {
    if (mask != ~0u) emulator::fail("a shuffle of some lanes only");
    return emulator::exchange(emulator::XOR, d, x)[(emulator::block.current % 32) ^ d];
}
template <class V> V __shfl_up_sync(u32, V x, int d) {
    int lane = emulator::block.current % 32;
    return emulator::exchange(emulator::UP, d, x)[lane >= d ? lane - d : lane];
}
template <class V> V __shfl_sync(u32, V x, int from) { return emulator::exchange(emulator::INDEX, 0, x)[from % 32]; }
inline u32 atomicOr(u32* p, u32 x) {
    u32 old = *p;
    *p |= x;
    return old;
}

template <class To, class From> To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline double __longlong_as_double(i64 x) { return bits_as<double>(x); }
inline i64 __double_as_longlong(double x) { return bits_as<i64>(x); }

inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }

inline float exp2_flushed(float x) {
    float y = std::exp2(x);
    return y < 0x1p-126f ? 0.0f : y;
}

inline float widen(f16 x) { return (float)bits_as<_Float16>(x.bits); }
inline f16 to_f16(float x) { return {bits_as<u16>((_Float16)x)}; }
inline float widen(bf16 x) { return bits_as<float>((u32)x.bits << 16); }
inline bf16 to_bf16(float x) {
    u32 b = bits_as<u32>(x);
    if (x != x) return {0x7fff};
    return {(u16)((b + 0x7fff + (b >> 16 & 1)) >> 16)};
}
inline f16 to_half(float x, f16) { return to_f16(x); }
inline bf16 to_half(float x, bf16) { return to_bf16(x); }
template <class H> u32 pack2(float low, float high, H kind) {
    return (u32)to_half(low, kind).bits | (u32)to_half(high, kind).bits << 16;
}

inline void store16(void* to, const uint4& x) { *(uint4*)to = x; }

inline void check_shared(const void* p, size_t bytes) {
    const u8* at = (const u8*)p;
    auto& b = emulator::block;
    if (at < b.shared || at + bytes > b.shared + b.size) emulator::fail("an address outside of shared memory");
    if ((uintptr_t)p % 16) emulator::fail("an address that is no multiple of 16");
}

inline void matrices(u32 (&r)[4], const void* row, bool transposed) {
    check_shared(row, 16);
    int lane = emulator::block.current % 32;
    const void* const* rows = emulator::exchange(emulator::MATRICES, transposed, row);
    for (int m = 0; m < 4; m++) {
        u16 pair[2];
        for (int e = 0; e < 2; e++) {
            int along = lane % 4 * 2 + e, across = lane / 4;
            const u16* from = (const u16*)rows[8 * m + (transposed ? along : across)];
            pair[e] = from[transposed ? across : along];
        }
        r[m] = pair[0] | (u32)pair[1] << 16;
    }
}
inline void load_matrices(u32 (&r)[4], const void* row) { matrices(r, row, false); }
inline void load_matrices_transposed(u32 (&r)[4], const void* row) { matrices(r, row, true); }

struct MmaOperands {
    u32 a[4], b[2];
};
template <class H> void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, H) {
    MmaOperands mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    const MmaOperands* all = emulator::exchange(emulator::MMA, 0, mine);
    auto half = [](u32 pair, int e) { return (double)widen(H{(u16)(pair >> 16 * e)}); };
    auto left = [&](int row, int k) { return half(all[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2], k % 2); };
    auto right = [&](int k, int column) { return half(all[column * 4 + k % 8 / 2].b[k / 8], k % 2); };
    int lane = emulator::block.current % 32;
    for (int e = 0; e < 4; e++) {
        int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        double sum = c[e];
        for (int k = 0; k < 16; k++) sum += left(row, k) * right(k, column);
        c[e] = (float)sum;
    }
}

inline void copy_async16(void* to, const void* from, bool wanted) {
    check_shared(to, 16);
    if ((uintptr_t)from % 16) emulator::fail("an asynchronous copy from an address that is no multiple of 16");
    memset(to, 0xff, 16);
    emulator::self().copies.push_back({to, from, wanted});
}
inline void copy_async_commit() {
    auto& me = emulator::self();
    me.groups.push_back({});
    me.groups.back().swap(me.copies);
}
inline void copy_async_wait() {
    auto& groups = emulator::self().groups;
    while (!groups.empty()) {
        for (auto& c : groups.front()) {
            if (c.wanted)
                memcpy(c.to, c.from, 16);
            else
                memset(c.to, 0, 16);
        }
        groups.erase(groups.begin());
    }
}

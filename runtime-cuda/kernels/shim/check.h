// Helpers of the tests: guarded memory, random values of every type, comparison with a reference in double precision.
#pragma once
#include "emulator.h"

#include "../common.cuh"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <string>
#include <sys/mman.h>

// A namespace's name from a list of defines.
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

inline int failures = 0, comparisons = 0;

struct Test {
    std::function<void()> run;
    static std::vector<Test>& all() {
        static std::vector<Test> tests;
        return tests;
    }
    Test(std::function<void()> f) : run(f) {
        if (f) all().push_back(*this);
    }
};

inline int run_all(const char* name) {
    for (auto& t : Test::all()) t.run();
    printf("%s: %zu variants, %d comparisons, %d failures\n", name, Test::all().size(), comparisons, failures);
    return failures != 0;
}

struct Random {
    u64 state;
    u32 bits() {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return (u32)(state >> 33) ^ (u32)(state >> 13);
    }
    double unit() { return bits() / 4294967296.0; }
    double normal() { return (unit() + unit() + unit() + unit() - 2.0) * 1.7320508; }
    i64 below(i64 n) { return (i64)(unit() * n); }
};
inline Random rng{42};

// Host values of element types.
template <class E> double number(E x) { return (double)load(x); }
template <class E> E element(double x) {
    if constexpr (std::is_same_v<E, f16>)
        return to_f16((float)x);
    else if constexpr (std::is_same_v<E, bf16>)
        return to_bf16((float)x);
    else if constexpr (std::is_same_v<E, b8>)
        return b8{x != 0};
    else
        return (E)x;
}
template <class E> constexpr bool is_floating = std::is_floating_point_v<E> || std::is_same_v<E, f16> || std::is_same_v<E, bf16>;

// A relative error of one rounding of the type.
template <class E> double unit_of() {
    if (std::is_same_v<E, double>) return 1e-15;
    if (std::is_same_v<E, float>) return 6e-8;
    if (std::is_same_v<E, f16>) return 4.9e-4;
    if (std::is_same_v<E, bf16>) return 3.95e-3;
    return 0;
}

// Memory that ends at a page no one may touch, with its elements.
template <class E> struct Memory {
    E* data;
    size_t size;

    explicit Memory(size_t n) : size(n) {
        size_t page = 4096, pages = (n * sizeof(E) + 16 + page - 1) / page * page;
        u8* base = (u8*)mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        mprotect(base + pages, page, PROT_NONE);
        memset(base, 0xff, pages);
        data = (E*)(base + pages - n * sizeof(E));
    }
    Memory(const std::vector<double>& values) : Memory(values.size()) {
        for (size_t i = 0; i < size; i++) data[i] = element<E>(values[i]);
    }
    Memory(const Memory&) = delete;
    Memory(Memory&& other) : data(other.data), size(other.size) {}

    operator E*() const { return data; }
    std::vector<double> numbers() const {
        std::vector<double> v(size);
        for (size_t i = 0; i < size; i++) v[i] = number(data[i]);
        return v;
    }
    static Memory normal(size_t n, double scale = 1) {
        std::vector<double> v(n);
        for (auto& x : v) x = rng.normal() * scale;
        return Memory(v);
    }
};

inline Strided strided(std::initializer_list<i64> sizes, std::initializer_list<i64> strides) {
    Strided s = {};
    s.rank = (int)sizes.size();
    for (int i = 0; i < s.rank; i++) s.size[i] = (int)sizes.begin()[i], s.stride[i] = strides.begin()[i];
    return s;
}

// |got - want| <= tolerance (scale + |want|); NaN and infinities must agree. An integer type has tolerance 0.
inline void compare(const std::string& what, const std::vector<double>& got, const std::vector<double>& want, double tolerance,
                    double scale = 1) {
    comparisons++;
    double worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < want.size(); i++) {
        double error = std::abs(got[i] - want[i]) / (scale + std::abs(want[i]));
        if (got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i]))) error = 0;
        if (std::isnan(error)) error = std::numeric_limits<double>::infinity();
        if (error > worst) worst = error, at = i;
    }
    if (getenv("VERBOSE")) printf("%s: worst %.3g of %.3g\n", what.c_str(), worst, tolerance);
    if (worst > tolerance) {
        failures++;
        printf("FAILED %s: at %zu got %.9g, want %.9g (error %.3g, allowed %.3g)\n", what.c_str(), at, got[at], want[at], worst,
               tolerance);
    }
}

// Runs a test in every order of threads.
template <class F> void in_orders(F f) {
    for (int order = 0; order < emulator::orders; order++) f(order);
}

inline dim3 blocks(i64 n, i64 per) { return dim3((u32)std::max<i64>(1, (n + per - 1) / per)); }

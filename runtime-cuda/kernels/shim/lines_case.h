// arg_reduce.cu, scan.cu and sort.cu of one type, with keys of type K: all kernels that work along an axis.
namespace CASE {
namespace largest {
#define LARGEST 1
#include "../arg_reduce.cu"
#undef LARGEST
}  // namespace largest
namespace smallest {
#define LARGEST 0
#include "../arg_reduce.cu"
#undef LARGEST
}  // namespace smallest
namespace sum {
#define OP 0
#include "../scan.cu"
#undef OP
#undef START
}  // namespace sum
namespace product {
#define OP 1
#include "../scan.cu"
#undef OP
#undef START
}  // namespace product
namespace linear {
#define OP 2
#include "../scan.cu"
#undef OP
#undef START
}  // namespace linear
#undef TILE
#undef TILE_THREADS
#undef TILE_ITEMS
namespace sorting {
#include "../sort.cu"
}
#include "../radix.cu"

typedef Compute<T>::type C;

// Few different values, so that there are equals; sometimes NaN and infinities.
static Memory<T> values(size_t n, bool special) {
    Memory<T> x(n);
    for (size_t i = 0; i < n; i++) {
        x[i] = element<T>(std::floor(rng.normal() * 4) + (is_floating<T> ? 0 : 20));
        if (is_floating<T> && special && rng.below(6) == 0) x[i] = element<T>(rng.below(2) ? NAN : rng.below(2) ? INFINITY : -0.0);
    }
    return x;
}

static void arg_reduce(i64 lines, i64 n, bool across, bool special) {
    std::string what = std::string(__PRETTY_FUNCTION__) + " " + std::to_string(lines) + "x" + std::to_string(n);
    Memory<T> x = values(lines * n, special);
    i64 line = across ? 1 : n, step = across ? lines : 1;
    std::vector<double> high(lines), low(lines);
    for (i64 l = 0; l < lines; l++)
        for (i64 i = 1; i < n; i++) {
            auto at = [&](double k) { return number(x[l * line + (i64)k * step]); };
            if (std::isnan(at(i)) ? !std::isnan(at(high[l])) : at(i) > at(high[l])) high[l] = i;
            if (std::isnan(at(i)) ? !std::isnan(at(low[l])) : at(i) < at(low[l])) low[l] = i;
        }
    Strided out_at = strided({lines}, {2}), x_at = strided({lines}, {line});
    Memory<i64> out(2 * lines - 1);
    auto check = [&](const char* way, const std::vector<double>& want) {
        std::vector<double> got(lines);
        for (i64 l = 0; l < lines; l++) got[l] = (double)out[2 * l];
        compare(what + way, got, want, 0);
    };
    in_orders([&](int order) {
        emulator::launch(order, blocks(lines, 256), dim3(256), 0,
                         [&] { largest::arg_reduce_columns(out, x, out_at, x_at, lines, n, step); });
        check(" columns max", high);
        emulator::launch(order, blocks(lines, 256), dim3(256), 0,
                         [&] { smallest::arg_reduce_columns(out, x, out_at, x_at, lines, n, step); });
        check(" columns min", low);
        emulator::launch(order, dim3(lines), dim3(256), 0,
                         [&] { largest::arg_reduce_rows(out, nullptr, x, out_at, x_at, n, step, n); });
        check(" rows max", high);
        i64 chunk = 300, chunks = (n + chunk - 1) / chunk;
        Memory<i64> best(lines * chunks);
        if (chunks < 2) return;
        emulator::launch(order, dim3(lines, chunks), dim3(256), 0,
                         [&] { smallest::arg_reduce_rows(best, nullptr, x, out_at, x_at, n, step, chunk); });
        emulator::launch(order, dim3(lines), dim3(256), 0,
                         [&] { smallest::arg_reduce_rows(out, best, x, out_at, x_at, chunks, step, chunks); });
        check(" chunks min", low);
    });
}

template <class Values, class Lines, class Parts, class Starts> static void scan(const std::string& name, int op, i64 lines, i64 n,
                                                                                 bool across, bool reverse, Lines one_each,
                                                                                 Parts parts_of, Starts starts_of, Values fill) {
    std::string what =
        std::string(__PRETTY_FUNCTION__).substr(0, 40) + name + " " + std::to_string(lines) + "x" + std::to_string(n);
    Memory<T> x(lines * n), a(lines * n), y(lines * n);
    for (i64 i = 0; i < lines * n; i++) {
        // Products stay near one; the sums of integers are exact.
        x[i] =
            element<T>(op == 1 ? (is_floating<T> ? std::exp2((double)rng.below(3) - 1) : 1 + rng.below(2)) : (double)rng.below(4));
        a[i] = element<T>(is_floating<T> ? rng.unit() : (double)rng.below(2));
    }
    if (is_floating<T> && n > 40) x[35] = element<T>(NAN);
    i64 line = across ? 1 : n, step = across ? lines : 1, start = reverse ? (n - 1) * step : 0;
    if (reverse) step = -step;
    std::vector<double> want(lines * n);
    for (i64 l = 0; l < lines; l++) {
        C value = op == 1 ? 1 : 0;
        for (i64 t = 0; t < n; t++) {
            i64 at = start + l * line + t * step;
            C in = load(x[at]);
            value = op == 0 ? plus(value, in) : op == 1 ? times(value, in) : plus(times((C)load(a[at]), value), in);
            want[at] = number(Store<T>::of(value));
        }
    }
    Strided at = strided({lines}, {line});
    double tolerance = op == 2 && is_floating<T> ? unit_of<T>() + 20 * unit_of<C>() : 0;
    in_orders([&](int order) {
        emulator::launch(order, blocks(lines, 256), dim3(256), 0,
                         [&] { one_each(y + start, x + start, a + start, at, at, at, lines, n, step, step, step); });
        compare(what + " lines", y.numbers(), want, tolerance);
        memset(y, 0xff, y.size * sizeof(T));
        emulator::launch(order, dim3(lines), dim3(256), 0,
                         [&] { fill(y + start, x + start, a + start, (const C*)nullptr, at, at, at, n, n, step, step, step); });
        compare(what + " blocks", y.numbers(), want, tolerance);
        i64 part = 700, parts = (n + part - 1) / part;
        Memory<C> a_parts(lines * parts), x_parts(lines * parts), starts(lines * parts);
        memset(y, 0xff, y.size * sizeof(T));
        emulator::launch(order, dim3(lines, parts), dim3(256), 0,
                         [&] { parts_of(a_parts, x_parts, x + start, a + start, at, at, n, part, step, step); });
        emulator::launch(order, blocks(lines, 256), dim3(256), 0, [&] { starts_of(starts, a_parts, x_parts, lines, parts); });
        emulator::launch(order, dim3(lines, parts), dim3(256), 0,
                         [&] { fill(y + start, x + start, a + start, (const C*)starts, at, at, at, n, part, step, step, step); });
        compare(what + " parts", y.numbers(), want, tolerance);
    });
}

static void scans(i64 lines, i64 n, bool across, bool reverse) {
    scan("sum", 0, lines, n, across, reverse, sum::scan_lines, sum::scan_parts, sum::scan_starts, sum::scan_values);
    scan("product", 1, lines, is_floating<T> ? std::min<i64>(n, 90) : n, across, reverse, product::scan_lines, product::scan_parts,
         product::scan_starts, product::scan_values);
    scan("linear", 2, lines, n, across, reverse, linear::scan_lines, linear::scan_parts, linear::scan_starts, linear::scan_values);
}

static void sort(i64 lines, i64 n, bool across, int descending) {
    std::string what = std::string(__PRETTY_FUNCTION__) + " " + std::to_string(lines) + "x" + std::to_string(n) +
                       (descending ? " descending" : "");
    Memory<T> x = values(lines * n, true), out(lines * n);
    Memory<i64> index(lines * n);
    i64 line = across ? 1 : n, step = across ? lines : 1;
    std::vector<double> want_values(lines * n), want_index(lines * n), xs = x.numbers();
    for (i64 l = 0; l < lines; l++) {
        std::vector<i64> places(n);
        std::iota(places.begin(), places.end(), 0);
        auto before = [&](double a, double b) { return !std::isnan(a) && (std::isnan(b) || a < b); };
        std::stable_sort(places.begin(), places.end(), [&](i64 i, i64 j) {
            double a = xs[l * line + i * step], b = xs[l * line + j * step];
            return descending ? before(b, a) : before(a, b);
        });
        for (i64 i = 0; i < n; i++)
            want_values[l * line + i * step] = xs[l * line + places[i] * step], want_index[l * n + i] = (double)places[i];
    }
    Strided at = strided({lines}, {line}), index_at = strided({lines}, {n});
    auto check = [&](const char* way) {
        compare(what + way, out.numbers(), want_values, 0);
        compare(what + way + " index", index.numbers(), want_index, 0);
    };
    in_orders([&](int order) {
        int width = 2;
        while (width < n) width *= 2;
        if (width <= 4096) {
            int threads = std::min(512, std::max(32, width / 2));
            emulator::launch(order, dim3(lines), dim3(threads), width * (sizeof(sorting::Key) + 4),
                             [&] { sorting::sort_short(out, index, x, at, index_at, at, n, width, step, 1, step, descending); });
            check(" short");
        }
        Memory<sorting::Key> keys(lines * n), keys2(lines * n);
        Memory<u32> places(lines * n), places2(lines * n), counts(lines * 16 * ((n + 2047) / 2048));
        emulator::launch(order, blocks(lines * n, 256), dim3(256), 0,
                         [&] { sorting::sort_keys(keys, places, x, at, lines * n, n, step, descending); });
        K *from = keys, *to = keys2;
        u32 *places_from = places, *places_to = places2;
        // Bits that are the same in all keys of the type need no pass.
        int from_bit = std::is_same_v<T, f16> ? 12 : std::is_same_v<T, bf16> ? 16 : 0;
        for (int shift = from_bit; shift < (std::is_same_v<T, u8> ? 8 : 8 * (int)sizeof(sorting::Key)); shift += 4) {
            dim3 grid((n + 2047) / 2048, lines);
            emulator::launch(order, grid, dim3(256), 0, [&] { radix_count(counts, from, n, shift); });
            emulator::launch(order, dim3(lines), dim3(256), 0, [&] { radix_places(counts, 16 * grid.x); });
            emulator::launch(order, grid, dim3(256), 0, [&] { radix_move(to, places_to, from, places_from, counts, n, shift); });
            std::swap(from, to), std::swap(places_from, places_to);
        }
        emulator::launch(order, blocks(lines * n, 256), dim3(256), 0,
                         [&] { sorting::sort_values(out, index, x, places_from, at, index_at, at, lines * n, n, step, 1, step); });
        check(" long");
    });
}

static Test test([] {
    arg_reduce(3, 700, false, true);
    arg_reduce(5, 33, true, false);
    arg_reduce(2, 1, false, false);
    scans(2, 2100, false, false);
    scans(37, 9, true, true);
    scans(1, 1500, false, true);
    sort(2, 45, false, 0);
    sort(3, 130, true, 1);
    sort(1, 1, false, 0);
    if (sizeof(T) == 4) sort(2, 2500, false, 1);
});
}  // namespace CASE
#undef CASE
#undef T
#undef K
#undef THREADS
#undef ITEMS
#undef TILE
#undef DIGITS

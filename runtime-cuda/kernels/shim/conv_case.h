// One variant of conv.cu.
namespace CASE {
#include "../conv.cu"

static void run(Conv c, bool joint) {
    std::string what = std::string(__PRETTY_FUNCTION__);
    sized(c);
    i64 pixels = (i64)c.out_height * c.out_width, rows = (i64)c.channels * c.kernel_height * c.kernel_width;
    i64 batch_step = joint ? pixels : rows * pixels, row_step = joint ? c.batch * pixels : pixels;
    // Channels last: strides in another order than the sizes.
    Strided at = strided({c.batch, c.channels, c.height, c.width},
                         {(i64)c.height * c.width * c.channels, 1, (i64)c.width * c.channels, c.channels});
    i64 size = (i64)c.batch * c.channels * c.height * c.width;
    Memory<T> x = Memory<T>::normal(size), columns(c.batch * rows * pixels), y = Memory<T>::normal(c.batch * rows * pixels),
              d(size);
    std::vector<double> want(c.batch * rows * pixels), back(size), ys = y.numbers();
    for (int n = 0; n < c.batch; n++)
        for (int ch = 0; ch < c.channels; ch++)
            for (int r = 0; r < c.kernel_height; r++)
                for (int s = 0; s < c.kernel_width; s++)
                    for (int p = 0; p < c.out_height; p++)
                        for (int q = 0; q < c.out_width; q++) {
                            int h = p * c.stride_height + r * c.dilation_height - c.padding_height,
                                w = q * c.stride_width + s * c.dilation_width - c.padding_width;
                            i64 to =
                                n * batch_step + ((ch * c.kernel_height + r) * c.kernel_width + s) * row_step + p * c.out_width + q;
                            if (h < 0 || h >= c.height || w < 0 || w >= c.width) continue;
                            want[to] = number(x[n * at.stride[0] + ch * at.stride[1] + h * at.stride[2] + w * at.stride[3]]);
                            back[((n * c.channels + ch) * c.height + h) * c.width + w] += ys[to];
                        }
    in_orders([&](int order) {
        emulator::launch(order, blocks(columns.size, 3 * 256), dim3(256), 0,
                         [&] { unfold(columns, x, at, c, batch_step, row_step); });
        compare(what + " columns", columns.numbers(), want, 0);
        emulator::launch(order, blocks(size, 2 * 256), dim3(256), 0, [&] { fold(d, y, c, batch_step, row_step); });
        // One rounding of every addition, of up to 25.
        compare(what + " fold", d.numbers(), back, unit_of<T>() + 25 * unit_of<Compute<T>::type>());
    });
}

static Test test([] {
    run({2, 3, 7, 9, 3, 3, 0, 0, 1, 1, 1, 1, 1, 1}, false);
    run({3, 2, 11, 8, 3, 2, 0, 0, 2, 3, 2, 0, 2, 1}, true);
    run({1, 4, 5, 5, 1, 1, 0, 0, 2, 2, 0, 0, 1, 1}, false);
    run({1, 1, 2, 2, 5, 5, 0, 0, 1, 1, 4, 4, 1, 1}, true);
});
}  // namespace CASE
#undef CASE
#undef T

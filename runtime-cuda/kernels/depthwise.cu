// Two-dimensional convolution with one input channel per group, directly: as a GEMM every group would be a single row.
// y [N, C M, P, Q] from x [N, C, H, W] and w [C M, 1, R, S], all contiguous; M = `multiplier` outputs per channel.
// Defines: T.
#include "window.cuh"

typedef typename Compute<T>::type Value;

// One thread per output.
KERNEL void depthwise(T* y, const T* x, const T* w, CONSTANT Conv c, int multiplier) {
    i64 count = (i64)c.batch * c.channels * multiplier * c.out_height * c.out_width;
    for (i64 i = global_thread(); i < count; i += global_threads()) {
        i64 line = i / c.out_width, plane = line / c.out_height;
        int q = (int)(i - line * c.out_width), p = (int)(line - plane * c.out_height);
        i64 out = plane % (c.channels * multiplier), from = plane / multiplier * c.height;
        const T* kernel = w + out * c.kernel_height * c.kernel_width;
        Value sum = Value(0);
        for (int r = 0; r < c.kernel_height; r++) {
            int h = c.row_in(p, r);
            if (h < 0 || h >= c.height) continue;
            for (int s = 0; s < c.kernel_width; s++) {
                int at = c.column_in(q, s);
                if (at < 0 || at >= c.width) continue;
                sum += load(x[(from + h) * c.width + at]) * load(kernel[r * c.kernel_width + s]);
            }
        }
        y[i] = Store<T>::of(sum);
    }
}

// The adjoint in x, from y: one thread per input, in the order of (m, r, s).
KERNEL void depthwise_input(T* x, const T* y, const T* w, CONSTANT Conv c, int multiplier) {
    i64 count = (i64)c.batch * c.channels * c.height * c.width;
    for (i64 i = global_thread(); i < count; i += global_threads()) {
        i64 line = i / c.width, plane = line / c.height;
        int column = (int)(i - line * c.width), row = (int)(line - plane * c.height);
        Value sum = Value(0);
        for (int m = 0; m < multiplier; m++) {
            i64 out = plane * multiplier + m, kernel = out % (c.channels * multiplier) * c.kernel_height;
            for (int r = 0; r < c.kernel_height; r++) {
                int p = c.row_out(row, r);
                if (p < 0) continue;
                for (int s = 0; s < c.kernel_width; s++) {
                    int q = c.column_out(column, s);
                    if (q < 0) continue;
                    sum += load(y[(out * c.out_height + p) * c.out_width + q]) * load(w[(kernel + r) * c.kernel_width + s]);
                }
            }
        }
        x[i] = Store<T>::of(sum);
    }
}

// The adjoint in w: gridDim = [C M R S], blockDim = [256]; a block sums one weight over all images and outputs.
KERNEL void depthwise_weight(T* w, const T* x, const T* y, CONSTANT Conv c, int multiplier) {
    i64 weight = blockIdx.x, line = weight / c.kernel_width, out = line / c.kernel_height;
    int s = (int)(weight - line * c.kernel_width), r = (int)(line - out * c.kernel_height);
    i64 pixels = (i64)c.out_height * c.out_width, outs = (i64)c.channels * multiplier;
    Value sum = Value(0);
    for (i64 i = threadIdx.x; i < c.batch * pixels; i += blockDim.x) {
        i64 n = i / pixels;
        int pixel = (int)(i - n * pixels), p = pixel / c.out_width, h = c.row_in(p, r),
            at = c.column_in(pixel - p * c.out_width, s);
        if (h < 0 || h >= c.height || at < 0 || at >= c.width) continue;
        i64 plane = n * c.channels + out / multiplier;
        sum += load(y[(n * outs + out) * pixels + pixel]) * load(x[(plane * c.height + h) * c.width + at]);
    }
    sum = Row<256>::sum(sum);
    if (threadIdx.x == 0) w[weight] = Store<T>::of(sum);
}

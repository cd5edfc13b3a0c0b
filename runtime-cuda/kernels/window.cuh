// Which inputs a window of a two-dimensional convolution covers.
#ifndef WEFT_WINDOW
#define WEFT_WINDOW
#include "common.cuh"

// Sizes: batch, input channels, input, kernel and output; then the options.
struct Conv {
    int batch, channels, height, width, kernel_height, kernel_width, out_height, out_width;
    int stride_height, stride_width, padding_height, padding_width, dilation_height, dilation_width;

    // Where weight (r, s) of output (p, q) reads; outside of the input in the padding.
    DEVICE int row_in(int p, int r) const { return p * stride_height - padding_height + r * dilation_height; }
    DEVICE int column_in(int q, int s) const { return q * stride_width - padding_width + s * dilation_width; }

    // The output that reads input (h, w) by weight (r, s); -1 if none does.
    DEVICE int row_out(int h, int r) const { return out_of(h + padding_height - r * dilation_height, stride_height, out_height); }
    DEVICE int column_out(int w, int s) const { return out_of(w + padding_width - s * dilation_width, stride_width, out_width); }

    static DEVICE int out_of(int offset, int stride, int size) {
        int p = offset / stride;
        return offset < 0 || p * stride != offset || p >= size ? -1 : p;
    }
};
static_assert(sizeof(Conv) == 56, "the launcher packs this structure");

#endif

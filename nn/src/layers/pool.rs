//! Pooling over the last axes of `x: [N, C, ..]`.

use autograd::Var;
use numcore::{
    Result, Runtime, Within,
    ops::{PoolOps, PoolOptions},
};

use crate::{Forward, Module};

macro_rules! window_pools {
    ($($(#[$doc:meta])* $name:ident $method:ident $one:ident $two:ident $three:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Module)]
        pub struct $name<const N: usize> {
            /// The geometry of the windows: kernel, stride, padding and dilation.
            #[module(skip)]
            pub options: PoolOptions<N>,
        }

        #[doc = concat!("[`", stringify!($name), "`] of signals, `[N, C, L]`.")]
        pub type $one = $name<1>;
        #[doc = concat!("[`", stringify!($name), "`] of images, `[N, C, H, W]`.")]
        pub type $two = $name<2>;
        #[doc = concat!("[`", stringify!($name), "`] of volumes, `[N, C, D, H, W]`.")]
        pub type $three = $name<3>;

        impl<const N: usize> $name<N> {
            /// Creates windows of `kernel` elements along each axis that do not overlap.
            pub fn new(kernel: usize) -> Self {
                $name { options: PoolOptions::new([kernel; N]) }
            }

            /// Sets the stride.
            pub fn with_stride(mut self, stride: [usize; N]) -> Self {
                self.options.stride = stride;
                self
            }

            /// Sets the padding, at most half the kernel.
            pub fn with_padding(mut self, padding: [usize; N]) -> Self {
                self.options.padding = padding;
                self
            }

            /// Sets the dilation, the distance between neighbors in a window.
            pub fn with_dilation(mut self, dilation: [usize; N]) -> Self {
                self.options.dilation = dilation;
                self
            }

            /// Adds a window for elements left over at the end.
            pub fn with_ceil_mode(mut self) -> Self {
                self.options.ceil_mode = true;
                self
            }
        }

        impl<R: Runtime, const N: usize> Forward<R> for $name<N> {
            #[track_caller]
            fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
                x.$method(&self.options).at_caller()
            }
        }
    )*};
}

window_pools! {
    /// Max pooling: the largest element of each window.
    MaxPool max_pool MaxPool1d MaxPool2d MaxPool3d;
    /// Mean pooling of each window, with the padding counted unless
    /// [`without_padding_counted`](AvgPool::without_padding_counted).
    AvgPool avg_pool AvgPool1d AvgPool2d AvgPool3d;
}

impl<const N: usize> AvgPool<N> {
    /// Excludes the elements of the padding from the divisor.
    #[doc(alias = "count_include_pad")]
    pub fn without_padding_counted(mut self) -> Self {
        self.options.count_include_pad = false;
        self
    }
}

/// Power-mean pooling, `(Σ |x|^p)^(1/p)` of each window.
#[derive(Clone, Copy, Debug, PartialEq, Module)]
pub struct LpPool<const N: usize> {
    /// The exponent of the norm, positive.
    pub p: f64,
    /// The geometry of the windows: kernel, stride, padding and dilation.
    #[module(skip)]
    pub options: PoolOptions<N>,
}

impl<R: Runtime, const N: usize> Forward<R> for LpPool<N> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        x.lp_pool(self.p, &self.options).at_caller()
    }
}

macro_rules! adaptive_pools {
    ($($(#[$doc:meta])* $name:ident $method:ident $one:ident $two:ident $three:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Module)]
        pub struct $name<const N: usize> {
            /// The sizes of the output.
            #[module(skip)]
            pub size: [usize; N],
        }

        #[doc = concat!("[`", stringify!($name), "`] of signals, `[N, C, L]`.")]
        pub type $one = $name<1>;
        #[doc = concat!("[`", stringify!($name), "`] of images, `[N, C, H, W]`.")]
        pub type $two = $name<2>;
        #[doc = concat!("[`", stringify!($name), "`] of volumes, `[N, C, D, H, W]`.")]
        pub type $three = $name<3>;

        impl<R: Runtime, const N: usize> Forward<R> for $name<N> {
            #[track_caller]
            fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
                x.$method(self.size).at_caller()
            }
        }
    )*};
}

adaptive_pools! {
    /// Means over regions of nearly equal size, giving `[N, C, size]` for every input size.
    AdaptiveAvgPool adaptive_avg_pool AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d;
    /// The largest elements of regions of nearly equal size, giving `[N, C, size]` for every input size.
    AdaptiveMaxPool adaptive_max_pool AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d;
}

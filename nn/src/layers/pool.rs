//! Pools of `x: [N, C, H, W]`.

use autograd::Var;
use numcore::{Result, Runtime, fused::NnOps};

use crate::{Forward, Module};

macro_rules! window_pools {
    ($($(#[$doc:meta])* $name:ident $method:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Module)]
        pub struct $name {
            /// Sizes of a window.
            pub kernel: [usize; 2],
            /// From one window to the next.
            pub stride: [usize; 2],
            /// How far windows reach over the edge; at most half the kernel.
            pub padding: [usize; 2],
        }

        impl $name {
            /// Square windows side by side.
            pub fn new(kernel: usize) -> Self {
                $name { kernel: [kernel; 2], stride: [kernel; 2], padding: [0; 2] }
            }

            /// The same with another stride.
            pub fn with_stride(self, stride: [usize; 2]) -> Self {
                $name { stride, ..self }
            }

            /// The same with padding.
            pub fn with_padding(self, padding: [usize; 2]) -> Self {
                $name { padding, ..self }
            }
        }

        impl<R: Runtime> Forward<R> for $name {
            fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
                x.$method(self.kernel, self.stride, self.padding)
            }
        }
    )*};
}

window_pools! {
    /// The largest of each window.
    MaxPool2d max_pool2d;
    /// The mean of each window, the padding counted.
    AvgPool2d avg_pool2d;
}

/// Means over regions as equal as they come, giving `[N, C, size[0], size[1]]` whatever the input's size.
#[derive(Clone, Copy, Debug, PartialEq, Module)]
pub struct AdaptiveAvgPool2d {
    /// Sizes of the output.
    pub size: [usize; 2],
}

impl<R: Runtime> Forward<R> for AdaptiveAvgPool2d {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        x.adaptive_avg_pool2d(self.size)
    }
}

//! Convolutions at the boundaries of a partition. There are one image per task and parts of one, micro-panels and rows
//! that end within each other, split sums, adjacent windows and remainders. The CPU's own tests include this file.

use numcore::fused::{Conv, ConvKind};

/// A square kernel over images.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    images: usize,
    /// Input and output channels.
    channels: [usize; 2],
    size: [usize; 2],
    kernel: usize,
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    groups: usize,
}

const PLAIN: Geometry = Geometry {
    images: 13,
    channels: [4, 5],
    size: [7, 9],
    kernel: 3,
    stride: [1, 1],
    padding: [1, 1],
    dilation: [1, 1],
    groups: 1,
};

pub(super) const GEOMETRIES: [Geometry; 17] = [
    // Each task has one image.
    PLAIN,
    Geometry { channels: [8, 16], size: [8, 8], padding: [2, 2], groups: 2, ..PLAIN },
    // The last image has none behind it, and needs no frame.
    Geometry { channels: [3, 9], size: [26, 26], padding: [0, 0], ..PLAIN },
    Geometry { channels: [8, 9], size: [5, 1], kernel: 1, padding: [0, 0], ..PLAIN },
    // Parts of one image.
    Geometry { images: 1, channels: [5, 20], size: [23, 30], ..PLAIN },
    Geometry { images: 1, channels: [5, 20], size: [23, 30], padding: [0, 0], stride: [2, 3], ..PLAIN },
    // More terms than a part of a sum has, and large weights.
    Geometry { channels: [72, 4], size: [5, 6], ..PLAIN },
    Geometry { images: 2, channels: [160, 140], size: [5, 5], ..PLAIN },
    // Windows that are not adjacent.
    Geometry { size: [11, 15], stride: [2, 1], dilation: [1, 3], padding: [0, 2], ..PLAIN },
    Geometry { size: [12, 14], stride: [3, 2], dilation: [2, 3], padding: [2, 1], ..PLAIN },
    Geometry { channels: [8, 8], size: [9, 60], stride: [1, 4], kernel: 2, groups: 2, ..PLAIN },
    // For matrix units: one image per task and parts of one, groups, channels without a pair, rows shorter than a
    // tile's, strided positions.
    Geometry { images: 9, channels: [32, 48], size: [9, 31], padding: [1, 2], ..PLAIN },
    Geometry { images: 1, channels: [31, 40], size: [23, 30], padding: [0, 0], ..PLAIN },
    Geometry { images: 2, channels: [64, 40], size: [20, 26], groups: 2, ..PLAIN },
    Geometry { images: 1, channels: [29, 35], size: [60, 5], ..PLAIN },
    Geometry { images: 2, channels: [64, 32], size: [40, 53], padding: [2, 0], stride: [2, 3], ..PLAIN },
    Geometry { images: 1, channels: [64, 64], size: [20, 31], padding: [1, 3], dilation: [1, 3], ..PLAIN },
];

/// An op, and the shape of each of its operands with the seed of the values.
pub(super) type ConvCall = (Conv, Vec<(Vec<usize>, u64)>);

impl Geometry {
    /// The convolution with and without a bias, and its two adjoints.
    pub(super) fn calls(&self) -> [ConvCall; 5] {
        let Geometry { images: n, channels: [c, o], size: [h, w], kernel, stride, padding, dilation, groups } = *self;
        let [p, q] = self.output();
        let (x, y) = ((vec![n, c, h, w], 1), (vec![n, o, p, q], 3));
        let weights = (vec![o, c / groups, kernel, kernel], 2);
        let bias = |channels| (vec![channels, 1, 1], 5);
        let op = |kind, bias| Conv { kind, stride, padding, dilation, groups, bias };
        [
            (op(ConvKind::Forward, false), vec![x.clone(), weights.clone()]),
            (op(ConvKind::Input([h, w]), false), vec![y.clone(), weights.clone()]),
            (op(ConvKind::Weight([kernel, kernel]), false), vec![x.clone(), y.clone()]),
            (op(ConvKind::Forward, true), vec![x, weights.clone(), bias(o)]),
            (op(ConvKind::Input([h, w]), true), vec![y, weights, bias(c)]),
        ]
    }

    /// Height and width of the output.
    fn output(&self) -> [usize; 2] {
        [0, 1].map(|i| {
            (self.size[i] + 2 * self.padding[i] - (self.kernel - 1) * self.dilation[i] - 1) / self.stride[i] + 1
        })
    }
}

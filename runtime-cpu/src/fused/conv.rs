//! Convolution as products whose left operand is the image itself: number `(i, k)` of "all windows as a matrix" lies at a place of the
//! row plus a place of the step, so no window is ever copied (im2col wrote and read each input `R · S` times).
//!
//! | kind | rows | steps of the sum | columns |
//! |---|---|---|---|
//! | forward | places of `y` | channels and places of the kernel | channels of `y` |
//! | adjoint in `x`, stride 1 | places of `x` | channels of `y` and places of the kernel, turned by half a turn | channels of `x` |
//! | adjoint in `w` | channels and places of the kernel | places of `y` | channels of `y` |

use std::cell::RefCell;

use numcore::{
    Result, Support,
    fused::{Conv, ConvKind},
};

use super::{Call, Float, one};
use crate::{
    Buffer,
    matmul::{Epilogue, Left, Line, Matrix, PACKED, Packed, ROWS, Right, product_in_columns, product_of, room},
    operand::Base,
};

/// Columns below which most of a register would be empty.
const FEW: usize = 4;
/// Groups of images whose weight gradients are summed apart, then in order. A number of its own, so that bits depend on sizes alone.
const PARTS: usize = 8;

/// `[N, channels, height, width]`, of which a group has `depth` channels.
#[derive(Clone, Copy)]
struct Images {
    count: usize,
    channels: usize,
    depth: usize,
    size: [usize; 2],
}

impl Images {
    fn of(dims: &[usize], groups: usize) -> Images {
        Images { count: dims[0], channels: dims[1], depth: dims[1] / groups, size: [dims[2], dims[3]] }
    }

    /// Numbers of one channel.
    fn plane(&self) -> usize {
        self.size[0] * self.size[1]
    }

    /// Where the channels of one group of one image begin.
    fn start(&self, image: usize, group: usize) -> isize {
        ((image * self.channels + group * self.depth) * self.plane()) as isize
    }
}

/// Places on a grid: `outer · outer_step + inner · inner_step` for all of `size`, row by row.
fn grid(size: [usize; 2], step: [usize; 2]) -> impl Iterator<Item = usize> {
    (0..size[0]).flat_map(move |i| (0..size[1]).map(move |j| i * step[0] + j * step[1]))
}

/// The same places in every channel.
fn in_channels(channels: usize, plane: usize, places: &[usize]) -> Vec<usize> {
    (0..channels).flat_map(|c| places.iter().map(move |p| c * plane + p)).collect()
}

pub(super) fn run<T: Float>(call: &Call<'_>, op: &Conv) -> Result<Support> {
    let [x, w, y] = match op.kind {
        ConvKind::Forward => [&call.ins[0], &call.ins[1], &call.outs[0]],
        ConvKind::Input(_) => [&call.outs[0], &call.ins[1], &call.ins[0]],
        ConvKind::Weight(_) => [&call.ins[0], &call.outs[0], &call.ins[1]],
    }
    .map(|o| o.layout.dims());
    let problem = Problem { call, op, x: Images::of(x, op.groups), y: Images::of(y, op.groups), kernel: [w[2], w[3]] };
    let columns = if let ConvKind::Input(_) = op.kind { problem.x.depth } else { problem.y.depth };
    let empty = call.ins.iter().chain(&call.outs).any(|o| o.layout.numel() == 0);
    let skips = op.stride != [1, 1] && matches!(op.kind, ConvKind::Input(_));
    if columns < FEW || empty || skips {
        return Ok(Support::Decompose);
    }
    match op.kind {
        ConvKind::Forward => problem.forward::<T>()?,
        ConvKind::Input(_) => problem.input::<T>()?,
        ConvKind::Weight(_) => problem.weight::<T>()?,
    }
    Ok(Support::Done)
}

struct Problem<'p, 'a> {
    call: &'p Call<'a>,
    op: &'p Conv,
    x: Images,
    y: Images,
    kernel: [usize; 2],
}

/// Zeros around an image, at least as many behind as before.
#[derive(Clone, Copy)]
struct Border {
    before: [usize; 2],
    behind: [usize; 2],
}

impl Border {
    fn is_none(&self) -> bool {
        self.before == [0, 0] && self.behind == [0, 0]
    }

    fn around(&self, images: Images) -> Images {
        let size = [0, 1].map(|i| self.before[i] + images.size[i] + self.behind[i].max(self.before[i]));
        Images { size, ..images }
    }

    /// Channels with their borders.
    fn draw<T: Float>(&self, images: Images, from: &[T], to: &mut [T]) {
        let larger = self.around(images);
        for (from, to) in from.chunks_exact(images.plane()).zip(to.chunks_exact_mut(larger.plane())) {
            to.fill(T::default());
            for (i, row) in from.chunks_exact(images.size[1]).enumerate() {
                to[(i + self.before[0]) * larger.size[1] + self.before[1]..][..row.len()].copy_from_slice(row);
            }
        }
    }
}

/// Images with a border, in memory of their own if there is one.
struct Bordered<T> {
    at: Base<T>,
    images: Images,
    _memory: Option<Buffer>,
}

/// All windows of images with a border: where they begin, and where in one its numbers lie.
struct Windows<'a, T> {
    of: Base<T>,
    images: Images,
    border: Border,
    rows: &'a [usize],
    steps: &'a [usize],
}

thread_local! {
    /// One image with its border; kept, so that a product allocates nothing.
    static IMAGE: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

impl Problem<'_, '_> {
    fn forward<T: Float>(&self) -> Result<()> {
        let border = Border { before: self.op.padding, behind: [0, 0] };
        let x = border.around(self.x);
        let line = x.size[1];
        let [stride, dilation] = [self.op.stride, self.op.dilation];
        let rows: Vec<usize> = grid(self.y.size, [stride[0] * line, stride[1]]).collect();
        let kernel: Vec<usize> = grid(self.kernel, [dilation[0] * line, dilation[1]]).collect();
        let steps = in_channels(x.depth, x.plane(), &kernel);
        let (w, y) = (self.call.input::<T>(1), self.call.output::<T>(0));
        let weights = |group| Matrix {
            at: w.at((group * self.y.depth * steps.len()) as isize).cast_const(),
            row: 1,
            column: steps.len() as isize,
        };
        let windows = Windows { of: self.call.input(0), images: self.x, border, rows: &rows, steps: &steps };
        self.maps(windows, weights, y, self.y)
    }

    /// With stride 1 the adjoint is a convolution of `y` with the kernel turned by half a turn.
    fn input<T: Float>(&self) -> Result<()> {
        let (padding, dilation) = (self.op.padding, self.op.dilation);
        let reach = [0, 1].map(|i| (self.kernel[i] - 1) * dilation[i]);
        let before = [0, 1].map(|i| reach[i].saturating_sub(padding[i]));
        let after = [0, 1].map(|i| (self.x.size[i] + padding[i]).saturating_sub(self.y.size[i]));
        let border = Border { before, behind: after };
        let y = border.around(self.y);
        let line = y.size[1];
        let rows: Vec<usize> = grid(self.x.size, [line, 1]).collect();
        // Row `h` of `x` met row `h + padding − r · dilation` of `y`.
        let origin = [0, 1].map(|i| before[i] + padding[i]);
        let kernel: Vec<usize> = (0..self.kernel[0])
            .flat_map(|r| (0..self.kernel[1]).map(move |s| (r, s)))
            .map(|(r, s)| (origin[0] - r * dilation[0]) * line + origin[1] - s * dilation[1])
            .collect();
        let steps = in_channels(y.depth, y.plane(), &kernel);
        let turned = self.weights_by_channel::<T>(kernel.len())?;
        let w = Base::<T>::new(turned.ptr().cast());
        let (channels, x) = (self.x.depth, self.call.output::<T>(0));
        let weights = |group| Matrix {
            at: w.at((group * steps.len() * channels) as isize).cast_const(),
            row: channels as isize,
            column: 1,
        };
        let windows = Windows { of: self.call.input(0), images: self.y, border, rows: &rows, steps: &steps };
        self.maps(windows, weights, x, self.x)
    }

    /// `[G, O/G, R · S, C/G]` from `[O, C/G, R · S]`: channels of `x` side by side.
    fn weights_by_channel<T: Float>(&self, places: usize) -> Result<Buffer> {
        let (outer, channels) = (self.y.channels, self.x.depth);
        let memory = self.call.cpu.scratch(outer * places * channels * size_of::<T>())?;
        let (from, to) = (self.call.input::<T>(1), Base::<T>::new(memory.ptr().cast()));
        for o in 0..outer {
            for c in 0..channels {
                for p in 0..places {
                    // SAFETY: all within the weights, and the memory just taken.
                    unsafe {
                        *to.at(((o * places + p) * channels + c) as isize) =
                            from.get(((o * channels + c) * places + p) as isize);
                    }
                }
            }
        }
        Ok(memory)
    }

    fn weight<T: Float>(&self) -> Result<()> {
        let x = self.bordered::<T>(self.call.input(0), self.x, Border { before: self.op.padding, behind: [0, 0] })?;
        let line = x.images.size[1];
        let [stride, dilation] = [self.op.stride, self.op.dilation];
        let kernel: Vec<usize> = grid(self.kernel, [dilation[0] * line, dilation[1]]).collect();
        let rows = in_channels(x.images.depth, x.images.plane(), &kernel);
        let steps: Vec<usize> = grid(self.y.size, [stride[0] * line, stride[1]]).collect();
        let (y, w) = (self.call.input::<T>(1), self.call.output::<T>(0));
        let parts = self.x.count.min(PARTS);
        let images = self.x.count.div_ceil(parts);
        let one_sum = rows.len() * self.y.depth;
        let memory = self.call.cpu.scratch(parts * self.op.groups * one_sum * size_of::<T>())?;
        let sums = Base::<T>::new(memory.ptr().cast());
        self.call.engine().ranges(parts * self.op.groups, 1, |tasks| {
            for task in tasks {
                let (part, group) = (task / self.op.groups, task % self.op.groups);
                let out = Matrix { at: sums.at((task * one_sum) as isize), row: self.y.depth as isize, column: 1 };
                for image in part * images..self.x.count.min((part + 1) * images) {
                    let a = Left::Gathered { at: x.at.at(x.images.start(image, group)), rows: &rows, steps: &steps };
                    let at = y.at(self.y.start(image, group)).cast_const();
                    let b = Matrix { at, row: 1, column: self.y.plane() as isize };
                    let sizes = [rows.len(), steps.len(), self.y.depth];
                    let add = image > part * images;
                    // SAFETY: as in `forward`; the sum is this task's alone.
                    unsafe { product_of(self.call.engine().simd, sizes, out, a, b, one(), Epilogue::adding(add)) };
                }
            }
        });
        // Parts without images were never written.
        let written = self.x.count.div_ceil(images);
        for i in 0..self.y.channels * rows.len() {
            let (o, row) = (i / rows.len(), i % rows.len());
            let (group, o) = (o / self.y.depth, o % self.y.depth);
            let at = |part: usize| ((part * self.op.groups + group) * one_sum + row * self.y.depth + o) as isize;
            // SAFETY: all within the sums and the output.
            unsafe {
                *w.at(i as isize) = (1..written).fold(sums.get(at(0)), |sum, part| sum + sums.get(at(part)));
            }
        }
        Ok(())
    }

    /// One product of windows and weights for each image, group and part of the output's places.
    fn maps<T: Float>(
        &self,
        windows: Windows<'_, T>,
        weights: impl Fn(usize) -> Matrix<*const T> + Sync,
        to: Base<T>,
        out: Images,
    ) -> Result<()> {
        let (engine, groups) = (self.call.engine(), self.op.groups);
        let sizes = (windows.steps.len(), out.depth);
        let each_room = Packed::<T>::room(sizes.0, sizes.1);
        // Weights that stay in the second cache are packed once for all images; larger ones are cut as any product's.
        let fits = each_room * size_of::<T>() <= PACKED;
        let memory = self.call.cpu.scratch(if fits { groups * each_room * size_of::<T>() } else { 0 })?;
        let numbers = Base::<T>::new(memory.ptr().cast());
        let packed: Vec<_> = (0..if fits { groups } else { 0 })
            // SAFETY: the weights are an operand's, and each group's room is its own.
            .map(|g| unsafe {
                Packed::new(engine.simd, weights(g), sizes, numbers.slice_mut((g * each_room) as isize, each_room))
            })
            .collect();
        let each = out.count * groups;
        let cuts = (4 * engine.threads.count()).div_ceil(each);
        let rows = out.plane().div_ceil(cuts).next_multiple_of(ROWS);
        let parts = out.plane().div_ceil(rows);
        // Where a task has an image of its own it draws the border while the image is in cache; parts of one share it.
        let border = if parts == 1 { windows.border } else { Border { before: [0, 0], behind: [0, 0] } };
        let from = if parts == 1 {
            Bordered { at: windows.of, images: windows.images, _memory: None }
        } else {
            self.bordered(windows.of, windows.images, windows.border)?
        };
        engine.ranges(each * parts, 1, |tasks| {
            for task in tasks {
                let (map, part) = (task / parts, task % parts);
                let (image, group) = (map / groups, map % groups);
                let places = part * rows..out.plane().min((part + 1) * rows);
                let at = to.at(out.start(image, group) + places.start as isize);
                let maps = Matrix { at, row: 1, column: out.plane() as isize };
                let sizes = [places.len(), sizes.0, sizes.1];
                let b = packed.get(group).map_or_else(|| Right::Strided(weights(group)), |b| Right::Packed(*b));
                let product = |at: *const T| {
                    let a = Left::Gathered { at, rows: &windows.rows[places], steps: windows.steps };
                    // SAFETY: every window lies in its bordered image, and these places of the output are this task's alone.
                    unsafe { product_in_columns(engine.simd, sizes, maps, a, b) };
                };
                let start = from.images.start(image, group);
                if border.is_none() {
                    product(from.at.at(start));
                } else {
                    IMAGE.with_borrow_mut(|memory| {
                        let bordered = room(memory, from.images.depth * border.around(from.images).plane());
                        // SAFETY: the channels of this group in one image of the operand.
                        let image = unsafe { from.at.slice(start, from.images.depth * from.images.plane()) };
                        border.draw(from.images, image, bordered);
                        product(bordered.as_ptr());
                    });
                }
            }
        });
        Ok(())
    }

    /// All images with their border.
    fn bordered<T: Float>(&self, at: Base<T>, images: Images, border: Border) -> Result<Bordered<T>> {
        if border.is_none() {
            return Ok(Bordered { at, images, _memory: None });
        }
        let larger = border.around(images);
        let planes = images.count * images.channels;
        let memory = self.call.cpu.scratch(planes * larger.plane() * size_of::<T>())?;
        let to = Base::<T>::new(memory.ptr().cast());
        self.call.engine().ranges(planes, (1 << 14) / larger.plane() + 1, |part| {
            let (start, count) = (part.start, part.len());
            // SAFETY: planes of the operand, and those of the memory, which are this task's alone.
            let (from, to) = unsafe {
                (
                    at.slice((start * images.plane()) as isize, count * images.plane()),
                    to.slice_mut((start * larger.plane()) as isize, count * larger.plane()),
                )
            };
            border.draw(images, from, to);
        });
        Ok(Bordered { at: to, images: larger, _memory: Some(memory) })
    }
}

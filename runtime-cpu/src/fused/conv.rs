//! Convolution as implicit GEMM: one operand is an im2col view of the image. The address of an element is the offset of
//! a kernel tap plus the offset of an output position. So the view is read in place or packed a few micro-panels at a
//! time, and never written to memory as a whole (explicit im2col wrote and read each input `R · S` times).
//!
//! | kind | m | k | n |
//! |---|---|---|---|
//! | forward | channels of `y` | channels of `x` times kernel taps | positions of `y` |
//! | adjoint in `x`, stride 1 | channels of `x` | channels of `y` times taps rotated by 180° | positions of `x` |
//! | adjoint in `w` | channels of `x` times kernel taps | positions of `y` | channels of `y` |

use std::cell::RefCell;

use numcore::{
    Result, Support,
    fused::{Conv, ConvKind},
};

use super::{Float, FusedCall, grain};
use crate::{
    CpuBuffer,
    gemm::{CacheLine, ConvSize, ConvWeights, Epilogue, Im2col, Matrix, OVERREAD, gemm_im2col_lhs, workspace},
    operand::Base,
    simd::transpose,
};

/// The fewest output channels of a group: with fewer most of a micro-tile would be empty.
const MIN_CHANNELS: usize = 4;
/// Output positions of a task are a multiple of this, the widest B micro-panel.
const POSITIONS: usize = 48;
/// Groups of images that have partial sums of the weight gradients, which are then added in order. The number is fixed,
/// so that bits depend only on sizes.
const GROUPS_OF_IMAGES: usize = 8;
/// Rows of a weight gradient that are reduced at once.
const ROWS: usize = 64;

/// Images `[N, channels, height, width]`, of which a group has `depth` channels.
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

    /// Elements of one channel.
    fn plane(&self) -> usize {
        self.size[0] * self.size[1]
    }

    /// The offset of the first channel of one group of one image.
    fn start(&self, image: usize, group: usize) -> isize {
        ((image * self.channels + group * self.depth) * self.plane()) as isize
    }
}

/// Offsets on a grid: `i · step[0] + j · step[1]` for all `i, j` of `size`, row by row.
fn grid(size: [usize; 2], step: [usize; 2]) -> impl Iterator<Item = usize> {
    (0..size[0]).flat_map(move |i| (0..size[1]).map(move |j| i * step[0] + j * step[1]))
}

/// The offsets `places`, repeated in every channel.
fn per_channel(channels: usize, plane: usize, places: &[usize]) -> Vec<usize> {
    (0..channels).flat_map(|c| places.iter().map(move |p| c * plane + p)).collect()
}

pub(super) fn run<T: Float>(call: &FusedCall<'_>, op: &Conv) -> Result<Support> {
    let [x, w, y] = match op.kind {
        ConvKind::Forward => [&call.ins[0], &call.ins[1], &call.outs[0]],
        ConvKind::Input(_) => [&call.outs[0], &call.ins[1], &call.ins[0]],
        ConvKind::Weight(_) => [&call.ins[0], &call.outs[0], &call.ins[1]],
    }
    .map(|o| o.layout.dims());
    let problem =
        ConvProblem { call, op, x: Images::of(x, op.groups), y: Images::of(y, op.groups), kernel: [w[2], w[3]] };
    let channels = if let ConvKind::Input(_) = op.kind { problem.x.depth } else { problem.y.depth };
    let empty = call.ins.iter().chain(&call.outs).any(|o| o.layout.numel() == 0);
    let skips = op.stride != [1, 1] && matches!(op.kind, ConvKind::Input(_));
    if channels < MIN_CHANNELS || empty || skips {
        return Ok(Support::Decompose);
    }
    match op.kind {
        ConvKind::Forward => problem.forward::<T>()?,
        ConvKind::Input(_) => problem.input::<T>()?,
        ConvKind::Weight(_) => problem.weight::<T>()?,
    }
    Ok(Support::Done)
}

struct ConvProblem<'p, 'a> {
    call: &'p FusedCall<'a>,
    op: &'p Conv,
    x: Images,
    y: Images,
    kernel: [usize; 2],
}

/// The padding of images: zeros around them, at least as many after as before. With strides above 1, there is a plane
/// for each phase of the stride. So adjacent output positions read adjacent elements at every stride.
#[derive(Clone, Copy)]
struct Padding {
    before: [usize; 2],
    after: [usize; 2],
    stride: [usize; 2],
}

impl Padding {
    const NONE: Padding = Padding { before: [0, 0], after: [0, 0], stride: [1, 1] };

    fn is_none(&self) -> bool {
        self.before == [0, 0] && self.after == [0, 0] && self.stride == [1, 1]
    }

    /// Planes of a channel.
    fn planes(&self) -> usize {
        self.stride[0] * self.stride[1]
    }

    /// The sizes of the padded images.
    fn padded(&self, images: Images) -> Images {
        let size = [0, 1]
            .map(|i| (self.before[i] + images.size[i] + self.after[i].max(self.before[i])).div_ceil(self.stride[i]));
        Images { size, channels: images.channels * self.planes(), depth: images.depth * self.planes(), ..images }
    }

    /// The offset of a position of the padded image within its channel.
    fn place(&self, padded: Images, [h, w]: [usize; 2]) -> usize {
        let [down, across] = self.stride;
        let plane = h % down * across + w % across;
        plane * padded.plane() + h / down * padded.size[1] + w / across
    }

    /// Copies channels into their padded planes.
    fn pad_into<T: Float>(&self, images: Images, from: &[T], to: &mut [T]) {
        let padded = self.padded(images);
        let across = self.stride[1];
        for (from, to) in from.chunks_exact(images.plane()).zip(to.chunks_exact_mut(self.planes() * padded.plane())) {
            to.fill(T::default());
            for (h, row) in from.chunks_exact(images.size[1]).enumerate() {
                for first in 0..across.min(row.len()) {
                    let to = &mut to[self.place(padded, [h + self.before[0], first + self.before[1]])..];
                    match across {
                        1 => to[..row.len()].copy_from_slice(row),
                        _ => to.iter_mut().zip(row[first..].iter().step_by(across)).for_each(|(to, x)| *to = *x),
                    }
                }
            }
        }
    }
}

/// Padded images in memory of their own.
struct PaddedImages<T> {
    at: Base<T>,
    images: Images,
    _memory: CpuBuffer,
}

/// Im2col views of padded images: the offsets of output positions, and of channels times taps.
struct ImageView<'a, T> {
    of: Base<T>,
    images: Images,
    padding: Padding,
    columns: &'a [usize],
    rows: &'a [usize],
}

thread_local! {
    /// A padded image. It stays allocated, so that a GEMM allocates nothing.
    static IMAGE: RefCell<Vec<CacheLine>> = const { RefCell::new(Vec::new()) };
}

impl ConvProblem<'_, '_> {
    fn forward<T: Float>(&self) -> Result<()> {
        let padding = Padding { before: self.op.padding, after: [0, 0], stride: self.op.stride };
        let x = padding.padded(self.x);
        let columns: Vec<usize> = grid(self.y.size, [x.size[1], 1]).collect();
        let kernel: Vec<usize> = (0..self.kernel[0])
            .flat_map(|r| (0..self.kernel[1]).map(move |s| [r * self.op.dilation[0], s * self.op.dilation[1]]))
            .map(|place| padding.place(x, place))
            .collect();
        let rows = per_channel(self.x.depth, padding.planes() * x.plane(), &kernel);
        let view = ImageView { of: self.call.input(0), images: self.x, padding, columns: &columns, rows: &rows };
        self.implicit_gemm::<T>(view, self.call.input(1), self.y)
    }

    /// Computes the adjoint for stride 1, a convolution of `y` with the kernel rotated by 180°.
    fn input<T: Float>(&self) -> Result<()> {
        let (pad, dilation) = (self.op.padding, self.op.dilation);
        let reach = [0, 1].map(|i| (self.kernel[i] - 1) * dilation[i]);
        let before = [0, 1].map(|i| reach[i].saturating_sub(pad[i]));
        let after = [0, 1].map(|i| (self.x.size[i] + pad[i]).saturating_sub(self.y.size[i]));
        let padding = Padding { before, after, stride: [1, 1] };
        let y = padding.padded(self.y);
        let line = y.size[1];
        let columns: Vec<usize> = grid(self.x.size, [line, 1]).collect();
        // Row `h` of `x` met row `h + padding − r · dilation` of `y`.
        let origin = [0, 1].map(|i| before[i] + pad[i]);
        let kernel: Vec<usize> = (0..self.kernel[0])
            .flat_map(|r| (0..self.kernel[1]).map(move |s| (r, s)))
            .map(|(r, s)| (origin[0] - r * dilation[0]) * line + origin[1] - s * dilation[1])
            .collect();
        let rows = per_channel(y.depth, y.plane(), &kernel);
        let by_channel = self.weights_by_channel::<T>(kernel.len())?;
        let view = ImageView { of: self.call.input(0), images: self.y, padding, columns: &columns, rows: &rows };
        self.implicit_gemm::<T>(view, Base::new(by_channel.ptr().cast()), self.x)
    }

    /// Reorders `[O, C/G, R · S]` to `[G, C/G, O/G, R · S]`: the weights of each channel of `x`, contiguous.
    fn weights_by_channel<T: Float>(&self, places: usize) -> Result<CpuBuffer> {
        let (outer, channels) = (self.y.depth, self.x.depth);
        let memory = self.call.cpu.scratch(self.y.channels * channels * places * size_of::<T>())?;
        let (from, to) = (self.call.input::<T>(1), Base::<T>::new(memory.ptr().cast()));
        self.call.engine().ranges(self.op.groups * channels, grain(outer * places), |lines| {
            for (line, o) in lines.flat_map(|line| (0..outer).map(move |o| (line, o))) {
                let (group, c) = (line / channels, line % channels);
                let at = ((group * outer + o) * channels + c) * places;
                // SAFETY: both are within the weights' sizes; the elements of the memory just taken are this task's
                // alone.
                unsafe {
                    let from = from.slice(at as isize, places);
                    to.slice_mut(((line * outer + o) * places) as isize, places).copy_from_slice(from);
                }
            }
        });
        Ok(memory)
    }

    fn weight<T: Float>(&self) -> Result<()> {
        let padding = Padding { before: self.op.padding, ..Padding::NONE };
        let padded =
            if padding.is_none() { None } else { Some(self.padded::<T>(self.call.input(0), self.x, padding)?) };
        let (x, images) = padded.as_ref().map_or((self.call.input(0), self.x), |f| (f.at, f.images));
        let line = images.size[1];
        let [stride, dilation] = [self.op.stride, self.op.dilation];
        let kernel: Vec<usize> = grid(self.kernel, [dilation[0] * line, dilation[1]]).collect();
        let rows = per_channel(images.depth, images.plane(), &kernel);
        let columns: Vec<usize> = grid(self.y.size, [stride[0] * line, stride[1]]).collect();
        let (y, w) = (self.call.input::<T>(1), self.call.output::<T>(0));
        let parts = self.x.count.min(GROUPS_OF_IMAGES);
        let each = self.x.count.div_ceil(parts);
        let partial_len = rows.len() * self.y.depth;
        let memory = self.call.cpu.scratch(parts * self.op.groups * partial_len * size_of::<T>())?;
        let partials = Base::<T>::new(memory.ptr().cast());
        let simd = self.call.engine().simd;
        self.call.engine().ranges(parts * self.op.groups, 1, |tasks| {
            for task in tasks {
                let (part, group) = (task / self.op.groups, task % self.op.groups);
                let out =
                    Matrix { at: partials.at((task * partial_len) as isize), row: self.y.depth as isize, column: 1 };
                for image in part * each..self.x.count.min((part + 1) * each) {
                    let at = x.at(images.start(image, group)).cast_const();
                    let (plane, places) = (images.plane(), kernel.len());
                    let view = Im2col { at, plane, taps: places, rows: &rows, columns: &columns };
                    let at = y.at(self.y.start(image, group)).cast_const();
                    let b = Matrix { at, row: 1, column: self.y.plane() as isize };
                    let add = image > part * each;
                    // SAFETY: the view is within the padded image, and this partial sum is this task's alone.
                    unsafe { gemm_im2col_lhs(simd, self.y.depth, out, view, b, Epilogue::accumulate(add)) };
                }
            }
        });
        self.reduce_partials(partials, w, [rows.len(), self.x.count.div_ceil(each)]);
        Ok(())
    }

    /// Adds the partial sums of every group, `[rows, O/G]` each, in order, and transposes the result.
    fn reduce_partials<T: Float>(&self, partials: Base<T>, w: Base<T>, [rows, parts]: [usize; 2]) {
        let (engine, groups, depth) = (self.call.engine(), self.op.groups, self.y.depth);
        let blocks = rows.div_ceil(ROWS);
        let bytes = |n: usize| (n * size_of::<T>()) as isize;
        engine.ranges(groups * blocks, grain(ROWS * depth), |tasks| {
            for task in tasks {
                let (group, top) = (task / blocks, task % blocks * ROWS);
                let some = ROWS.min(rows - top);
                let at = |part: usize| (((part * groups + group) * rows + top) * depth) as isize;
                // SAFETY: rows of the sums and columns of the output that are this task's alone.
                unsafe {
                    let sum = partials.slice_mut(at(0), some * depth);
                    for part in 1..parts {
                        sum.iter_mut()
                            .zip(partials.slice(at(part), some * depth))
                            .for_each(|(sum, x)| *sum = *sum + *x);
                    }
                    let to = w.at((group * depth * rows + top) as isize);
                    let from = (sum.as_mut_ptr().cast(), bytes(depth));
                    transpose::<T>(engine.simd, (to.cast(), bytes(rows)), from, (depth, some));
                }
            }
        });
    }

    /// Multiplies weights, a row for each channel of `out`, by the view, for each image, group and range of output
    /// positions.
    fn implicit_gemm<T: Float>(&self, view: ImageView<'_, T>, weights: Base<T>, out: Images) -> Result<()> {
        let (engine, groups) = (self.call.engine(), self.op.groups);
        let plane = view.padding.planes() * view.padding.padded(view.images).plane();
        let kernel = self.kernel[0] * self.kernel[1];
        let size = ConvSize { groups, out_channels: out.depth, channels: view.images.depth, taps: kernel };
        let conv_weights = ConvWeights::new(self.call.cpu, weights, size, view.columns)?;
        let to = self.call.output::<T>(0);
        let bias = self.op.bias.then(|| self.call.input::<T>(2));
        let each = out.count * groups;
        let cuts = (4 * engine.threads.count()).div_ceil(each);
        let places = out.plane().div_ceil(cuts).next_multiple_of(POSITIONS);
        let parts = out.plane().div_ceil(places);
        // A task that has an image of its own pads it while it is in cache; tasks of one image share the padded one.
        let shared = if parts == 1 { None } else { Some(self.padded(view.of, view.images, view.padding)?) };
        engine.ranges(each * parts, 1, |tasks| {
            for task in tasks {
                let (map, part) = (task / parts, task % parts);
                let (image, group) = (map / groups, map % groups);
                let places = part * places..out.plane().min((part + 1) * places);
                let channel = group * out.depth;
                let out = Matrix {
                    at: to.at(out.start(image, group) + places.start as isize),
                    row: out.plane() as isize,
                    column: 1,
                };
                let bias = bias.map(|b| Matrix { at: b.at(channel as isize).cast_const(), row: 1, column: 0 });
                let epilogue = Epilogue { addends: [bias, None], ..Epilogue::accumulate(false) };
                let gemm = |at: *const T| {
                    let columns = &view.columns[places];
                    let view = Im2col { at, plane, taps: kernel, rows: view.rows, columns };
                    // SAFETY: the view is within the padded image, and these output positions are this task's alone.
                    unsafe { conv_weights.gemm(engine.simd, group, out, view, epilogue) };
                };
                if let Some(x) = &shared {
                    gemm(x.at.at(x.images.start(image, group)));
                    continue;
                }
                let images = view.images;
                let (start, elements) = (images.start(image, group), images.depth * images.plane());
                let after = images.count * images.channels * images.plane() - start as usize - elements;
                if view.padding.is_none() && after >= OVERREAD {
                    gemm(view.of.at(start));
                    continue;
                }
                IMAGE.with_borrow_mut(|memory| {
                    let padded = view.padding.padded(images);
                    let to = workspace(memory, padded.depth * padded.plane() + OVERREAD);
                    // SAFETY: the channels of this group in one image of the operand.
                    view.padding.pad_into(images, unsafe { view.of.slice(start, elements) }, to);
                    gemm(to.as_ptr());
                });
            }
        });
        Ok(())
    }

    /// Pads all images into workspace.
    fn padded<T: Float>(&self, at: Base<T>, images: Images, padding: Padding) -> Result<PaddedImages<T>> {
        let padded = padding.padded(images);
        let (channels, each) = (images.count * images.channels, padding.planes() * padded.plane());
        let memory = self.call.cpu.scratch((channels * each + OVERREAD) * size_of::<T>())?;
        let to = Base::<T>::new(memory.ptr().cast());
        self.call.engine().ranges(channels, (1 << 14) / each + 1, |part| {
            let (start, count) = (part.start, part.len());
            // SAFETY: channels of the operand, and of the memory, which are this task's alone.
            let (from, to) = unsafe {
                (
                    at.slice((start * images.plane()) as isize, count * images.plane()),
                    to.slice_mut((start * each) as isize, count * each),
                )
            };
            padding.pad_into(images, from, to);
        });
        // SAFETY: the end of the memory.
        unsafe { to.slice_mut((channels * each) as isize, OVERREAD) }.fill(T::default());
        Ok(PaddedImages { at: to, images: padded, _memory: memory })
    }
}

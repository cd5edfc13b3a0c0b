//! Convolution as products one of whose operands is the image itself: a number of "all windows as a matrix" lies at a place of the window
//! plus a place in it. So windows are read where they lie or packed a few panels at a time, and never all written to memory (im2col wrote and read
//! each input `R · S` times).
//!
//! | kind | rows | steps of the sum | columns |
//! |---|---|---|---|
//! | forward | channels of `y` | channels and places of the kernel | places of `y` |
//! | adjoint in `x`, stride 1 | channels of `x` | channels of `y` and places of the kernel, turned by half a turn | places of `x` |
//! | adjoint in `w` | channels and places of the kernel | places of `y` | channels of `y` |

use std::cell::RefCell;

use numcore::{
    Result, Support,
    fused::{Conv, ConvKind},
};

use super::{Call, Float, grain};
use crate::{
    Buffer,
    gemm::{CacheLine, ConvSize, ConvWeights, Epilogue, Im2col, Matrix, OVERREAD, gemm_im2col_lhs, workspace},
    operand::Base,
    simd::transpose,
};

/// Output channels of a group below which most of a tile would be empty.
const FEW: usize = 4;
/// Places of a task are multiples of this: of a panel where it is widest.
const PLACES: usize = 48;
/// Groups of images whose weight gradients are summed apart, then in order. A number of its own, so that bits depend on sizes alone.
const PARTS: usize = 8;
/// Rows of a weight gradient that are added up at once.
const ROWS: usize = 64;

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
    let channels = if let ConvKind::Input(_) = op.kind { problem.x.depth } else { problem.y.depth };
    let empty = call.ins.iter().chain(&call.outs).any(|o| o.layout.numel() == 0);
    let skips = op.stride != [1, 1] && matches!(op.kind, ConvKind::Input(_));
    if channels < FEW || empty || skips {
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

/// How images are laid out for windows: zeros around them, at least as many behind as before, and a plane of its own for each place within
/// a stride. So windows side by side begin at neighbours, whatever the stride.
#[derive(Clone, Copy)]
struct Frame {
    before: [usize; 2],
    behind: [usize; 2],
    stride: [usize; 2],
}

impl Frame {
    const NONE: Frame = Frame { before: [0, 0], behind: [0, 0], stride: [1, 1] };

    fn is_none(&self) -> bool {
        self.before == [0, 0] && self.behind == [0, 0] && self.stride == [1, 1]
    }

    /// Planes of a channel.
    fn planes(&self) -> usize {
        self.stride[0] * self.stride[1]
    }

    /// Images of those planes.
    fn around(&self, images: Images) -> Images {
        let size = [0, 1]
            .map(|i| (self.before[i] + images.size[i] + self.behind[i].max(self.before[i])).div_ceil(self.stride[i]));
        Images { size, channels: images.channels * self.planes(), depth: images.depth * self.planes(), ..images }
    }

    /// Where in a channel a place of the framed image lies.
    fn place(&self, framed: Images, [h, w]: [usize; 2]) -> usize {
        let [down, across] = self.stride;
        let plane = h % down * across + w % across;
        plane * framed.plane() + h / down * framed.size[1] + w / across
    }

    /// Channels in their frames.
    fn draw<T: Float>(&self, images: Images, from: &[T], to: &mut [T]) {
        let framed = self.around(images);
        let across = self.stride[1];
        for (from, to) in from.chunks_exact(images.plane()).zip(to.chunks_exact_mut(self.planes() * framed.plane())) {
            to.fill(T::default());
            for (h, row) in from.chunks_exact(images.size[1]).enumerate() {
                for first in 0..across.min(row.len()) {
                    let to = &mut to[self.place(framed, [h + self.before[0], first + self.before[1]])..];
                    match across {
                        1 => to[..row.len()].copy_from_slice(row),
                        _ => to.iter_mut().zip(row[first..].iter().step_by(across)).for_each(|(to, x)| *to = *x),
                    }
                }
            }
        }
    }
}

/// Images in their frames, in memory of their own.
struct Framed<T> {
    at: Base<T>,
    images: Images,
    _memory: Buffer,
}

/// All windows of framed images: where they begin, and where in one its numbers lie.
struct Windows<'a, T> {
    of: Base<T>,
    images: Images,
    frame: Frame,
    columns: &'a [usize],
    steps: &'a [usize],
}

thread_local! {
    /// One image in its frame; kept, so that a product allocates nothing.
    static IMAGE: RefCell<Vec<CacheLine>> = const { RefCell::new(Vec::new()) };
}

impl Problem<'_, '_> {
    fn forward<T: Float>(&self) -> Result<()> {
        let frame = Frame { before: self.op.padding, behind: [0, 0], stride: self.op.stride };
        let x = frame.around(self.x);
        let columns: Vec<usize> = grid(self.y.size, [x.size[1], 1]).collect();
        let kernel: Vec<usize> = (0..self.kernel[0])
            .flat_map(|r| (0..self.kernel[1]).map(move |s| [r * self.op.dilation[0], s * self.op.dilation[1]]))
            .map(|place| frame.place(x, place))
            .collect();
        let steps = in_channels(self.x.depth, frame.planes() * x.plane(), &kernel);
        let windows = Windows { of: self.call.input(0), images: self.x, frame, columns: &columns, steps: &steps };
        self.maps::<T>(windows, self.call.input(1), self.y)
    }

    /// With stride 1 the adjoint is a convolution of `y` with the kernel turned by half a turn.
    fn input<T: Float>(&self) -> Result<()> {
        let (padding, dilation) = (self.op.padding, self.op.dilation);
        let reach = [0, 1].map(|i| (self.kernel[i] - 1) * dilation[i]);
        let before = [0, 1].map(|i| reach[i].saturating_sub(padding[i]));
        let after = [0, 1].map(|i| (self.x.size[i] + padding[i]).saturating_sub(self.y.size[i]));
        let frame = Frame { before, behind: after, stride: [1, 1] };
        let y = frame.around(self.y);
        let line = y.size[1];
        let columns: Vec<usize> = grid(self.x.size, [line, 1]).collect();
        // Row `h` of `x` met row `h + padding − r · dilation` of `y`.
        let origin = [0, 1].map(|i| before[i] + padding[i]);
        let kernel: Vec<usize> = (0..self.kernel[0])
            .flat_map(|r| (0..self.kernel[1]).map(move |s| (r, s)))
            .map(|(r, s)| (origin[0] - r * dilation[0]) * line + origin[1] - s * dilation[1])
            .collect();
        let steps = in_channels(y.depth, y.plane(), &kernel);
        let by_channel = self.weights_by_channel::<T>(kernel.len())?;
        let windows = Windows { of: self.call.input(0), images: self.y, frame, columns: &columns, steps: &steps };
        self.maps::<T>(windows, Base::new(by_channel.ptr().cast()), self.x)
    }

    /// `[G, C/G, O/G, R · S]` from `[O, C/G, R · S]`: what a channel of `x` meets, in a line.
    fn weights_by_channel<T: Float>(&self, places: usize) -> Result<Buffer> {
        let (outer, channels) = (self.y.depth, self.x.depth);
        let memory = self.call.cpu.scratch(self.y.channels * channels * places * size_of::<T>())?;
        let (from, to) = (self.call.input::<T>(1), Base::<T>::new(memory.ptr().cast()));
        self.call.engine().ranges(self.op.groups * channels, grain(outer * places), |lines| {
            for (line, o) in lines.flat_map(|line| (0..outer).map(move |o| (line, o))) {
                let (group, c) = (line / channels, line % channels);
                let at = ((group * outer + o) * channels + c) * places;
                // SAFETY: all within the weights, and a line of the memory just taken, which is this task's alone.
                unsafe {
                    let from = from.slice(at as isize, places);
                    to.slice_mut(((line * outer + o) * places) as isize, places).copy_from_slice(from);
                }
            }
        });
        Ok(memory)
    }

    fn weight<T: Float>(&self) -> Result<()> {
        let frame = Frame { before: self.op.padding, ..Frame::NONE };
        let framed = if frame.is_none() { None } else { Some(self.framed::<T>(self.call.input(0), self.x, frame)?) };
        let (x, images) = framed.as_ref().map_or((self.call.input(0), self.x), |f| (f.at, f.images));
        let line = images.size[1];
        let [stride, dilation] = [self.op.stride, self.op.dilation];
        let kernel: Vec<usize> = grid(self.kernel, [dilation[0] * line, dilation[1]]).collect();
        let rows = in_channels(images.depth, images.plane(), &kernel);
        let steps: Vec<usize> = grid(self.y.size, [stride[0] * line, stride[1]]).collect();
        let (y, w) = (self.call.input::<T>(1), self.call.output::<T>(0));
        let parts = self.x.count.min(PARTS);
        let each = self.x.count.div_ceil(parts);
        let one_sum = rows.len() * self.y.depth;
        let memory = self.call.cpu.scratch(parts * self.op.groups * one_sum * size_of::<T>())?;
        let sums = Base::<T>::new(memory.ptr().cast());
        let simd = self.call.engine().simd;
        self.call.engine().ranges(parts * self.op.groups, 1, |tasks| {
            for task in tasks {
                let (part, group) = (task / self.op.groups, task % self.op.groups);
                let out = Matrix { at: sums.at((task * one_sum) as isize), row: self.y.depth as isize, column: 1 };
                for image in part * each..self.x.count.min((part + 1) * each) {
                    let at = x.at(images.start(image, group)).cast_const();
                    let (plane, places) = (images.plane(), kernel.len());
                    let windows = Im2col { at, plane, taps: places, rows: &rows, columns: &steps };
                    let at = y.at(self.y.start(image, group)).cast_const();
                    let b = Matrix { at, row: 1, column: self.y.plane() as isize };
                    let add = image > part * each;
                    // SAFETY: every window lies in its framed image, and this sum is this task's alone.
                    unsafe { gemm_im2col_lhs(simd, self.y.depth, out, windows, b, Epilogue::accumulate(add)) };
                }
            }
        });
        self.add_up(sums, w, [rows.len(), self.x.count.div_ceil(each)]);
        Ok(())
    }

    /// Parts of every group's sum, `[rows, O/G]` each, added up in order, and turned.
    fn add_up<T: Float>(&self, sums: Base<T>, w: Base<T>, [rows, parts]: [usize; 2]) {
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
                    let sum = sums.slice_mut(at(0), some * depth);
                    for part in 1..parts {
                        sum.iter_mut().zip(sums.slice(at(part), some * depth)).for_each(|(sum, x)| *sum = *sum + *x);
                    }
                    let to = w.at((group * depth * rows + top) as isize);
                    let from = (sum.as_mut_ptr().cast(), bytes(depth));
                    transpose::<T>(engine.simd, (to.cast(), bytes(rows)), from, (depth, some));
                }
            }
        });
    }

    /// One product of weights, a line for each channel of `out`, and windows for each image, group and part of the output's places.
    fn maps<T: Float>(&self, windows: Windows<'_, T>, weights: Base<T>, out: Images) -> Result<()> {
        let (engine, groups) = (self.call.engine(), self.op.groups);
        let plane = windows.frame.planes() * windows.frame.around(windows.images).plane();
        let kernel = self.kernel[0] * self.kernel[1];
        let size = ConvSize { groups, out_channels: out.depth, channels: windows.images.depth, taps: kernel };
        let filters = ConvWeights::new(self.call.cpu, weights, size, windows.columns)?;
        let to = self.call.output::<T>(0);
        let bias = self.op.bias.then(|| self.call.input::<T>(2));
        let each = out.count * groups;
        let cuts = (4 * engine.threads.count()).div_ceil(each);
        let places = out.plane().div_ceil(cuts).next_multiple_of(PLACES);
        let parts = out.plane().div_ceil(places);
        // Where a task has an image of its own it draws the frame while the image is in cache; parts of one share it.
        let shared = if parts == 1 { None } else { Some(self.framed(windows.of, windows.images, windows.frame)?) };
        engine.ranges(each * parts, 1, |tasks| {
            for task in tasks {
                let (map, part) = (task / parts, task % parts);
                let (image, group) = (map / groups, map % groups);
                let places = part * places..out.plane().min((part + 1) * places);
                let channel = group * out.depth;
                let maps = Matrix {
                    at: to.at(out.start(image, group) + places.start as isize),
                    row: out.plane() as isize,
                    column: 1,
                };
                let bias = bias.map(|b| Matrix { at: b.at(channel as isize).cast_const(), row: 1, column: 0 });
                let epilogue = Epilogue { addends: [bias, None], ..Epilogue::accumulate(false) };
                let product = |at: *const T| {
                    let columns = &windows.columns[places];
                    let windows = Im2col { at, plane, taps: kernel, rows: windows.steps, columns };
                    // SAFETY: every window lies in its framed image, and these places of the output are this task's alone.
                    unsafe { filters.gemm(engine.simd, group, maps, windows, epilogue) };
                };
                if let Some(x) = &shared {
                    product(x.at.at(x.images.start(image, group)));
                    continue;
                }
                let images = windows.images;
                let (start, numbers) = (images.start(image, group), images.depth * images.plane());
                let behind = images.count * images.channels * images.plane() - start as usize - numbers;
                if windows.frame.is_none() && behind >= OVERREAD {
                    product(windows.of.at(start));
                    continue;
                }
                IMAGE.with_borrow_mut(|memory| {
                    let framed = windows.frame.around(images);
                    let to = workspace(memory, framed.depth * framed.plane() + OVERREAD);
                    // SAFETY: the channels of this group in one image of the operand.
                    windows.frame.draw(images, unsafe { windows.of.slice(start, numbers) }, to);
                    product(to.as_ptr());
                });
            }
        });
        Ok(())
    }

    /// All images in their frames.
    fn framed<T: Float>(&self, at: Base<T>, images: Images, frame: Frame) -> Result<Framed<T>> {
        let framed = frame.around(images);
        let (channels, each) = (images.count * images.channels, frame.planes() * framed.plane());
        let memory = self.call.cpu.scratch((channels * each + OVERREAD) * size_of::<T>())?;
        let to = Base::<T>::new(memory.ptr().cast());
        self.call.engine().ranges(channels, (1 << 14) / each + 1, |part| {
            let (start, count) = (part.start, part.len());
            // SAFETY: channels of the operand, and those of the memory, which are this task's alone.
            let (from, to) = unsafe {
                (
                    at.slice((start * images.plane()) as isize, count * images.plane()),
                    to.slice_mut((start * each) as isize, count * each),
                )
            };
            frame.draw(images, from, to);
        });
        // SAFETY: the end of the memory.
        unsafe { to.slice_mut((channels * each) as isize, OVERREAD) }.fill(T::default());
        Ok(Framed { at: to, images: framed, _memory: memory })
    }
}

//! Matrix products. A workgroup computes a tile of the output. Each of its invocations keeps a block of the tile in
//! registers and reads the operands through workgroup memory (`tiles`), or from a subgroup (`subgroups`). No sum is
//! split, so the bits depend on nothing but the operands. Half-precision operands are upcast where they are read.

mod subgroups;
mod text;
mod tiles;

use numcore::{Accumulate, DType, Layout, LoopAxis, Out, Result, Shape, Support, View};
use smallvec::{SmallVec, smallvec};

use crate::{
    Wgpu,
    access::{Site, StorageForm, header},
    bindings::{Bindings, OperandView},
    elementwise::loops,
    pipelines::PipelineKey,
    pointwise::{STEPS, convert, no_f64},
    queue::{Dispatch, LARGEST},
    reduce::fill,
};

/// The workgroup is a square of invocations with this side.
const SIDE: usize = 8;
/// The most rows and columns of the output that one invocation keeps.
const BLOCK: [usize; 2] = [8, 8];
/// Rows and columns that an invocation of a subgroup keeps: a row's elements are loaded once for all columns.
const SUBGROUP_BLOCK: [usize; 2] = [16, 4];

/// Multiplies `a: [B.., M, K]` by `b: [B.., K, N]` into `out: [B.., M, N]`.
pub(crate) fn matmul(wgpu: &Wgpu, a: View<'_, Wgpu>, b: View<'_, Wgpu>, out: Out<'_, Wgpu>) -> Result<()> {
    let rank = out.view.layout().rank();
    let k = a.layout().dims()[rank - 1];
    if out.view.layout().numel() == 0 {
        return Ok(());
    }
    if a.dtype() == DType::F64 {
        return Err(no_f64(wgpu, "matmul"));
    }
    if k == 0 {
        return match out.how {
            Accumulate::Add => Ok(()),
            Accumulate::Overwrite => fill(wgpu, 0i64.into(), &mut [out]),
        };
    }
    let (to, a, b) = (OperandView::from(&out.view), OperandView::from(a), OperandView::from(b));
    if k <= STEPS {
        return in_pieces(wgpu, &[to, a, b], out.how);
    }
    // A long half-precision sum in several launches is accumulated in `f32`, so that it is rounded once.
    let half = to.dtype.is_half();
    let sums = Layout::contiguous(*to.layout.shape());
    let memory = if half { Some(wgpu.scratch(sums.numel() * DType::F32.size())?) } else { None };
    let wide = memory.as_ref().map_or(to, |m| OperandView::of(m, sums, DType::F32));
    for start in (0..k).step_by(STEPS) {
        let len = STEPS.min(k - start);
        let part = |x: OperandView<'_>, axis: usize| x.layout.slice(axis, start, len, 1);
        let how = if start > 0 {
            Accumulate::Add
        } else if half {
            Accumulate::Overwrite
        } else {
            out.how
        };
        in_pieces(wgpu, &[wide, a.seen(part(a, rank - 1)?), b.seen(part(b, rank - 2)?)], how)?;
    }
    if half { convert(wgpu, wide, to, out.how) } else { Ok(()) }
}

/// Computes `x · w` and adds a bias and a residual, rounded once. Inputs are `x: [.., M, K]`, `w: [K, N]`, then `[N]`
/// and `[.., M, N]` if given; the output is `[.., M, N]`.
pub(crate) fn linear(wgpu: &Wgpu, ins: &[OperandView<'_>], to: OperandView<'_>) -> Result<Support> {
    let (rank, k) = (to.layout.rank(), ins[1].layout.dims()[0]);
    let all: Places<'_> = [to].into_iter().chain(ins.iter().copied()).collect();
    if k > STEPS || !Bindings::binds(&wgpu.queue.device, &all, 0) {
        return Ok(Support::Decompose);
    }
    let mut places = all;
    if rank > 2 {
        // Rows of all batches are those of one product where they are evenly spaced.
        let rows = to.layout.dims()[..rank - 1].iter().product();
        let flat = |place: &OperandView<'_>| match place.layout.dims() {
            dims if dims.len() < rank => Some(place.layout),
            dims => place.layout.reshape(Shape::from([rows, dims[rank - 1]])),
        };
        if let Some(layouts) = places.iter().map(flat).collect::<Option<SmallVec<[Layout; 5]>>>() {
            places = places.iter().zip(layouts).map(|(place, layout)| place.seen(layout)).collect();
        }
    }
    let shape = *places[0].layout.shape();
    let of_weight = shape.with(shape.rank() - 2, k);
    for (i, place) in places.iter_mut().enumerate().skip(2) {
        *place = place.seen(place.layout.broadcast_to(if i == 2 { of_weight } else { shape })?);
    }
    in_pieces(wgpu, &places, Accumulate::Overwrite)?;
    Ok(Support::Done)
}

/// The output of a product, its left and right operands, and terms of the output's shape that are added.
type Places<'a> = SmallVec<[OperandView<'a>; 5]>;

/// Multiplies `places[1]` by `places[2]` into `places[0]` and adds the others. Launches have at most [`LARGEST`]
/// operations: halves of the rows, or of a batch axis.
fn in_pieces(wgpu: &Wgpu, places: &[OperandView<'_>], how: Accumulate) -> Result<()> {
    let dims = places[0].layout.dims();
    let rows = dims.len() - 2;
    let axis = (0..=rows).max_by_key(|&axis| dims[axis]).filter(|&axis| dims[axis] > 1);
    let Some(axis) = axis.filter(|_| operations(places) > LARGEST) else { return product(wgpu, places, how) };
    let half = dims[axis] / 2;
    for (start, len) in [(0, half), (half, dims[axis] - half)] {
        let mut piece: Places<'_> = places.into();
        for (_, place) in piece.iter_mut().enumerate().filter(|(k, _)| *k != 2 || axis < rows) {
            *place = place.seen(place.layout.slice(axis, start, len, 1)?);
        }
        in_pieces(wgpu, &piece, how)?;
    }
    Ok(())
}

/// The operations of a product, a multiplication and an addition counting two.
fn operations(places: &[OperandView<'_>]) -> u64 {
    let inner = places[1].layout.dims().last().copied().unwrap_or(0);
    2 * (places[0].layout.numel() * inner) as u64
}

/// Multiplies `places[1]` by `places[2]` into `places[0]` and adds the others, in one launch.
fn product(wgpu: &Wgpu, places: &[OperandView<'_>], how: Accumulate) -> Result<()> {
    let rank = places[0].layout.rank();
    let (m, n) = (places[0].layout.dims()[rank - 2], places[0].layout.dims()[rank - 1]);
    let k = places[1].layout.dims()[rank - 1];
    let (bindings, slots) = Bindings::of(&wgpu.queue.device, "matmul", places)?;
    let axes = (0..rank - 2).map(|i| {
        let strides = places.iter().map(|p| p.layout.strides()[i]).collect();
        LoopAxis { size: places[0].layout.dims()[i], strides }
    });
    let (batch, strides) = loops(axes, places.len());
    let mut atomic: SmallVec<[bool; 8]> = smallvec![false; bindings.len()];
    atomic[slots[0]] = StorageForm::of(places[0].dtype).per_word() > 1;
    let site = |(&slot, place): (&usize, &OperandView<'_>)| Site {
        slot,
        form: StorageForm::of(place.dtype),
        atomic: atomic[slot],
    };
    let sites: SmallVec<[Site; 5]> = slots.iter().zip(places).map(site).collect();
    let (side, most) = match wgpu.queue.device.lanes() {
        Some(lanes) => ([1, lanes], SUBGROUP_BLOCK),
        None => ([SIDE; 2], BLOCK),
    };
    // A larger block uses a loaded element more often; a small side would leave a large block empty.
    let block = |d: usize, side: usize, most: usize| (d.next_power_of_two() / side).clamp(1, most);
    let kernel = MatmulKernel {
        batch: batch.len(),
        sites: &sites,
        side,
        block: [block(m, side[0], most[0]), block(n, side[1], most[1])],
        how,
        // Adjacent invocations read adjacent elements.
        along: [1, 2].map(|i| {
            let strides = &places[i].layout.strides()[rank - 2..];
            side[0] > 1 && strides[1].abs() <= strides[0].abs()
        }),
    };
    let [tile_m, tile_n] = kernel.tile();
    let tiles = [m.div_ceil(tile_m), n.div_ceil(tile_n)];
    let count: usize = batch.iter().product();
    let mut params: SmallVec<[u32; 64]> =
        smallvec![0, m as u32, n as u32, k as u32, tiles[0] as u32, tiles[1] as u32, count as u32];
    params.extend(batch.iter().map(|&d| d as u32));
    for (i, place) in places.iter().enumerate() {
        params.push(bindings.base(slots[i], place));
        params.extend(strides[i].iter().map(|&s| s as u32));
        params.extend(place.layout.strides()[rank - 2..].iter().map(|&s| s as u32));
    }
    let mut details: SmallVec<[u32; 32]> =
        smallvec![batch.len() as u32, bindings.len() as u32, u32::from(how == Accumulate::Add)];
    details.extend(kernel.block.iter().map(|&b| b as u32).chain(kernel.along.iter().map(|&a| u32::from(a))));
    details.extend(sites.iter().map(|s| (s.slot as u32) << 8 | s.form as u32));
    let key = PipelineKey { kind: "matmul", program: None, details };
    let header = header(&atomic, params.len());
    let (groups, work) = (tiles[0] * tiles[1] * count, operations(places));
    let launch = Dispatch { op: "matmul", key, bindings, params: &params, groups, work };
    wgpu.queue.launch(launch, || Ok(header + &kernel.source()))
}

/// The properties of a GEMM kernel on which its source depends.
struct MatmulKernel<'k> {
    batch: usize,
    /// The sites of the output, the left and the right operand, and what is added.
    sites: &'k [Site],
    /// The rows and columns of invocations of a workgroup: of a square, or of one subgroup.
    side: [usize; 2],
    /// The rows and columns of the output that an invocation keeps.
    block: [usize; 2],
    how: Accumulate,
    /// True, for the left and the right operand, if adjacent invocations of a square read along its rows.
    along: [bool; 2],
}

impl MatmulKernel<'_> {
    /// The rows and columns of a workgroup's tile.
    fn tile(&self) -> [usize; 2] {
        std::array::from_fn(|i| self.side[i] * self.block[i])
    }

    fn source(&self) -> String {
        match self.side {
            [1, lanes] => subgroups::source(self, lanes),
            _ => tiles::source(self),
        }
    }
}

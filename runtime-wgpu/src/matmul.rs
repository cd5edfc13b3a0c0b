//! Matrix products. A workgroup computes a tile of the output. Each of its invocations keeps a block of the tile in
//! registers and reads the operands through workgroup memory. No sum is split, so the bits depend on nothing but the
//! operands. Half-precision operands are upcast where they are read.

use numcore::{Accumulate, DType, Layout, LoopAxis, Out, Result, Shape, Support, View};
use smallvec::{SmallVec, smallvec};

use crate::{
    Wgpu,
    access::{Params, Site, StorageForm, header, offset, unravel},
    bindings::{Bindings, OperandView},
    elementwise::loops,
    pipelines::PipelineKey,
    pointwise::{STEPS, convert, no_f64},
    queue::Dispatch,
    reduce::fill,
};

/// The workgroup is a square of invocations with this side.
const SIDE: usize = 8;
/// The candidates for the rows or columns of the output that one invocation keeps.
const BLOCKS: [usize; 3] = [8, 4, 2];
/// The most operations of one launch: a slow GPU computes them within a second, and drivers end work that takes longer
/// than two.
const LARGEST: u64 = if cfg!(test) { 100_000 } else { 100_000_000_000 };
/// The number of terms of the sums that are in workgroup memory at a time.
const DEPTH: usize = 16;

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

/// Computes `x · w` and adds a bias and a residual, rounded once. Inputs are `x: [.., M, K]`, `w: [K, N]`, then `[N]` and
/// `[.., M, N]` if given; the output is `[.., M, N]`.
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

/// Multiplies `places[1]` by `places[2]` into `places[0]` and adds the others, in launches of at most [`LARGEST`]
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
    // A larger block uses a loaded element more often; a small side would leave a large block empty.
    let block = [m, n].map(|d| BLOCKS.into_iter().find(|b| b * SIDE <= d.next_power_of_two()).unwrap_or(1));
    let [tile_m, tile_n] = block.map(|b| b * SIDE);
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
    let kernel = MatmulKernel {
        batch: batch.len(),
        sites: &sites,
        block,
        how,
        // Adjacent invocations read adjacent elements.
        along: [1, 2].map(|i| places[i].layout.strides()[rank - 1].abs() <= places[i].layout.strides()[rank - 2].abs()),
    };
    let mut details: SmallVec<[u32; 32]> =
        smallvec![batch.len() as u32, bindings.len() as u32, u32::from(how == Accumulate::Add)];
    details.extend(block.iter().map(|&b| b as u32).chain(kernel.along.iter().map(|&a| u32::from(a))));
    details.extend(sites.iter().map(|s| (s.slot as u32) << 8 | s.form as u32));
    let key = PipelineKey { kind: "matmul", program: None, details };
    let header = header(&atomic, params.len());
    let (groups, work) = (tiles[0] * tiles[1] * count, operations(places));
    let launch = Dispatch { op: "matmul", key, bindings, params: &params, groups, work };
    wgpu.queue.launch(launch, || Ok(kernel.source(&header)))
}

/// The properties of a GEMM kernel on which its source depends.
struct MatmulKernel<'k> {
    batch: usize,
    /// The sites of the output, the left and the right operand, and what is added.
    sites: &'k [Site],
    /// The rows and columns of the output that an invocation keeps.
    block: [usize; 2],
    how: Accumulate,
    /// True, for the left and the right operand, if adjacent invocations read along its rows.
    along: [bool; 2],
}

impl MatmulKernel<'_> {
    fn source(&self, header: &str) -> String {
        let mut params = Params::new();
        let [m, n, k, tiles_m, tiles_n, count] = std::array::from_fn(|_| params.next());
        let batch = params.many(self.batch);
        let mut starts = String::new();
        let mut steps: Vec<[String; 2]> = Vec::new();
        let added = (3..self.sites.len()).map(|i| format!("from_{i}"));
        for name in ["to", "from_a", "from_b"].map(String::from).into_iter().chain(added) {
            starts += &format!("let {name} = {};\n", offset(&params.next(), "c", &params.many(self.batch)));
            steps.push(std::array::from_fn(|_| params.next()));
        }
        let [left, right] = self.block.map(TileEdge);
        let (tm, tn, threads) = (left.tile(), right.tile(), SIDE * SIDE);
        let read_a = self.read("a", left, self.along[0], ["first_m", &m, &k], &steps[1]);
        let read_b = self.read("b", right, !self.along[1], ["first_n", &n, &k], &steps[2]);
        let each = |n: usize, f: &dyn Fn(usize) -> String| -> String { (0..n).map(f).collect() };
        let sums = |f: &dyn Fn(usize, usize) -> String| each(left.0, &|i| each(right.loads(), &|j| f(i, j)));
        let declare = sums(&|i, j| format!("var sum{i}_{j} = {}();\n", right.ty()));
        let rows = each(left.loads(), &|i| format!("let x{i} = a[t * {}u + y + {}u];\n", left.width(), i * SIDE));
        let columns = each(right.loads(), &|j| format!("let y{j} = b[t * {}u + x + {}u];\n", right.width(), j * SIDE));
        let terms = sums(&|i, j| format!("sum{i}_{j} += {} * y{j};\n", left.part("x", i)));
        let store = each(left.0, &|i| {
            each(right.0, &|j| {
                let sum = right.part(&format!("sum{i}_"), j);
                let value = self.sites[0].form.accumulate(self.how, &self.sites[0].load("at"), "value");
                let place =
                    |name: &str, [row, column]: &[String; 2]| format!("{name} + row * {row} + column * {column}");
                let add = |k: usize| {
                    let from = place(&format!("from_{k}"), &steps[k]);
                    format!("{{ let at = {from};\nvalue += {}; }}\n", self.sites[k].load("at"))
                };
                let added: String = (3..self.sites.len()).map(add).collect();
                format!(
                    "{{ let row = first_m + {}; let column = first_n + {};\nif (row < {m} && column < {n}) {{\n\
                     var value = {sum};\n{added}let at = {};\n{}}} }}\n",
                    left.place("y", i),
                    right.place("x", j),
                    place("to", &steps[0]),
                    self.sites[0].store("at", &value)
                )
            })
        });
        format!(
            "{header}var<workgroup> a: array<{}, {}>;\nvar<workgroup> b: array<{}, {}>;\n\
             @compute @workgroup_size({threads})\n\
             fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, \
             @builtin(local_invocation_index) local: u32) {{\n\
             wg_zero = P[0].x;\n\
             let task = group.y * groups.x + group.x;\nlet one = {tiles_m} * {tiles_n};\n\
             if (task >= one * {count}) {{ return; }}\n\
             let which = task / one;\nlet tile = task % one;\n{}{starts}\
             let first_m = (tile / {tiles_n}) * {tm}u;\nlet first_n = (tile % {tiles_n}) * {tn}u;\n\
             let x = local % {SIDE}u;\nlet y = local / {SIDE}u;\n{declare}\
             for (var depth = 0u; depth < {k}; depth += {DEPTH}u) {{\n{read_a}{read_b}workgroupBarrier();\n\
             for (var t = 0u; t < {DEPTH}u; t++) {{\n{rows}{columns}{terms}}}\nworkgroupBarrier();\n}}\n{store}}}\n",
            left.ty(),
            left.width() * DEPTH,
            right.ty(),
            right.width() * DEPTH,
            unravel("c", "which", &batch),
        )
    }

    /// Fills the tile of an operand, whose first axis is the terms of the sums, with zeros beyond the operand's edge.
    /// `inner` is true if the terms are the operand's inner axis.
    fn read(
        &self,
        name: &str,
        edge: TileEdge,
        inner: bool,
        [first, most, depth]: [&str; 3],
        steps: &[String; 2],
    ) -> String {
        let tile = edge.tile();
        // Adjacent invocations read adjacent elements.
        let (term, lane) = if inner {
            (format!("e % {DEPTH}u"), format!("e / {DEPTH}u"))
        } else {
            (format!("e / {tile}u"), format!("e % {tile}u"))
        };
        let (operand, [of_lane, of_term]) =
            if name == "a" { (1, [&steps[0], &steps[1]]) } else { (2, [&steps[1], &steps[0]]) };
        format!(
            "for (var e = local; e < {}u; e += {}u) {{\nlet term = {term};\nlet lane = {lane};\nvar value = 0f;\n\
             if ({first} + lane < {most} && depth + term < {depth}) {{\n\
             let at = from_{name} + ({first} + lane) * {of_lane} + (depth + term) * {of_term};\nvalue = {};\n}}\n{}}}\n",
            tile * DEPTH,
            SIDE * SIDE,
            self.sites[operand].load("at"),
            edge.set(name),
        )
    }
}

/// A side of the blocks: the number of rows or columns of an invocation, in vectors of four if there are four or
/// more. The vectors of adjacent invocations are adjacent.
#[derive(Clone, Copy)]
struct TileEdge(usize);

impl TileEdge {
    fn fours(self) -> bool {
        self.0 >= 4
    }

    /// The number of rows or columns of a workgroup's tile.
    fn tile(self) -> usize {
        self.0 * SIDE
    }

    fn ty(self) -> &'static str {
        if self.fours() { "vec4<f32>" } else { "f32" }
    }

    /// The length of one term in the array in workgroup memory, in elements. It exceeds the tile by one, so that terms
    /// do not fall into one bank.
    fn width(self) -> usize {
        1 + if self.fours() { self.tile() / 4 } else { self.tile() }
    }

    /// The number of elements or vectors that an invocation reads for one term.
    fn loads(self) -> usize {
        if self.fours() { self.0 / 4 } else { self.0 }
    }

    /// The element `i` of the vectors `name0`, `name1` …
    fn part(self, name: &str, i: usize) -> String {
        if self.fours() { format!("{name}{}.{}", i / 4, ["x", "y", "z", "w"][i % 4]) } else { format!("{name}{i}") }
    }

    /// The position in the tile of element `i` of an invocation.
    fn place(self, lane: &str, i: usize) -> String {
        if self.fours() {
            format!("4u * {lane} + {}u", i / 4 * SIDE * 4 + i % 4)
        } else {
            format!("{lane} + {}u", i * SIDE)
        }
    }

    /// Sets the element of `lane` and `term` in workgroup memory.
    fn set(self, name: &str) -> String {
        let width = self.width();
        if self.fours() {
            format!("{name}[term * {width}u + (lane >> 2u)][lane & 3u] = value;\n")
        } else {
            format!("{name}[term * {width}u + lane] = value;\n")
        }
    }
}

//! Recurrences along an axis. One invocation walks a row. A long row is divided into blocks and takes three passes.
//! They compute each block's effect on a zero state, the initial value of every block, and the elements of each block.
//! The running value is kept in the compute type and rounded only where it is stored.

use numcore::{DType, Layout, Result, ScanOp, Shape, View, ViewMut};
use smallvec::SmallVec;

use crate::{
    Wgpu, WgpuBuffer,
    access::StorageForm,
    bindings::OperandView,
    elementwise::{ElementwiseKernel, KernelBody},
    pointwise::no_f64,
};

/// The longest row that one invocation walks undivided.
const SHORT: usize = 2048;
/// The least elements of a block of a longer row.
const BLOCK: usize = 512;

/// Computes the recurrence `op` along `axis`.
pub(crate) fn scan(
    wgpu: &Wgpu,
    op: ScanOp,
    x: View<'_, Wgpu>,
    a: Option<View<'_, Wgpu>>,
    axis: usize,
    reverse: bool,
    out: ViewMut<'_, Wgpu>,
) -> Result<()> {
    let name = if op == ScanOp::Linear { "linear_scan" } else { "scan" };
    if out.layout().numel() == 0 {
        return Ok(());
    }
    if x.dtype() == DType::F64 {
        return Err(no_f64(wgpu, name));
    }
    let length = x.layout().dims()[axis];
    let block = if length <= SHORT { length } else { BLOCK.max(length.isqrt().next_power_of_two()) };
    let count = if block == length { 0 } else { out.layout().numel() / length * length.div_ceil(block) };
    let dtype = x.dtype().compute();
    // Short rows need no scratch memory: both sizes are 0.
    let begins: WgpuBuffer = wgpu.scratch(count * dtype.size())?;
    let factors: WgpuBuffer = wgpu.scratch(if op == ScanOp::Linear { count * dtype.size() } else { 0 })?;
    let mut scan = ScanKernel { wgpu, name, op, length, block, blocks: SmallVec::new(), strides: SmallVec::new() };
    for place in [OperandView::from(&out), x.into()].into_iter().chain(a.map(OperandView::from)) {
        let along = if reverse { place.layout.flip(axis)? } else { place.layout };
        // The starts of the blocks, as the last axis.
        let starts = along.slice(axis, 0, length.div_ceil(block), block)?;
        let order: SmallVec<[usize; 8]> = (0..along.rank()).filter(|&i| i != axis).chain([axis]).collect();
        scan.blocks.push(place.seen(starts.permute(&order)?));
        scan.strides.push(along.strides()[axis]);
    }
    if block == length {
        return scan.walk(None);
    }
    let shape = *scan.blocks[0].layout.shape();
    let place = |b| OperandView::of(b, Layout::contiguous(shape), dtype);
    let (begins, factors) = (place(&begins), (op == ScanOp::Linear).then(|| place(&factors)));
    scan.effects(begins, factors)?;
    scan.carry(begins, factors, shape)?;
    scan.walk(Some(begins))
}

struct ScanKernel<'a> {
    wgpu: &'a Wgpu,
    name: &'static str,
    op: ScanOp,
    length: usize,
    block: usize,
    /// The output, `x` and `a` at the starts of their blocks.
    blocks: SmallVec<[OperandView<'a>; 3]>,
    strides: SmallVec<[isize; 3]>,
}

impl<'a> ScanKernel<'a> {
    fn form(&self) -> StorageForm {
        StorageForm::of(self.blocks[1].dtype)
    }

    fn details(&self) -> [u32; 2] {
        [self.op as u32, self.blocks[1].dtype as u32]
    }

    fn numbers(&self) -> SmallVec<[u32; 8]> {
        let blocks = self.length.div_ceil(self.block);
        let mut numbers: SmallVec<[u32; 8]> =
            SmallVec::from_slice(&[self.length, self.block, blocks].map(|n| n as u32));
        numbers.extend(self.strides.iter().map(|&s| s as u32));
        numbers
    }

    /// The initial value of the recurrence.
    fn first(&self) -> String {
        let number = if self.op == ScanOp::Prod { "1" } else { "0" };
        let form = self.form();
        if form == StorageForm::I64 { format!("vec2<u32>({number}u, 0u)") } else { format!("{}({number})", form.ty()) }
    }

    /// The value after state `y` and element `x`, with the factor `a` in a linear recurrence.
    fn next(&self, y: &str, x: &str, a: &str) -> String {
        match self.op {
            ScanOp::Sum => self.form().add(y, x),
            ScanOp::Prod if self.form() == StorageForm::I64 => format!("wg_mul_i64({y}, {x})"),
            ScanOp::Prod => format!("{y} * {x}"),
            ScanOp::Linear => format!("{a} * {y} + {x}"),
        }
    }

    /// A loop over a block's elements that updates `y`; `each` adds statements for every element.
    fn elements(
        &self,
        body: &mut KernelBody<'_>,
        before: &str,
        each: impl Fn(&KernelBody<'_>, &str) -> String,
    ) -> String {
        let [length, block, blocks] = std::array::from_fn(|_| body.params.next());
        let steps = body.params.many(self.strides.len());
        let places: String =
            steps.iter().enumerate().map(|(k, step)| format!("let p{k} = at{k} + i * {step};\n")).collect();
        let x = body.load_at(1, "p1");
        let a = if self.op == ScanOp::Linear { format!("let a = {};\n", body.load_at(2, "p2")) } else { String::new() };
        let next = self.next("y", &x, "a");
        format!(
            "{before}let count = min({block}, {length} - (index % {blocks}) * {block});\n\
             for (var i = 0u; i < count; i++) {{\n{places}{a}y = {next};\n{}}}\n",
            each(body, "p0")
        )
    }

    /// Walks the blocks, each from its initial value, and stores the results.
    fn walk(&self, begins: Option<OperandView<'a>>) -> Result<()> {
        let form = self.form();
        let mut operands: SmallVec<[(OperandView<'a>, StorageForm); 4]> =
            self.blocks.iter().map(|b| (*b, form)).collect();
        operands.extend(begins.map(|b| (b, StorageForm::of(b.dtype))));
        let mut walk = ElementwiseKernel::new(self.wgpu, self.name, &operands, &[])?;
        walk.stores(0);
        let kind = if begins.is_some() { "scan_blocks" } else { "scan" };
        walk.run(self.wgpu, (self.name, kind), None, &[], (&self.numbers(), &self.details()), |body| {
            let first = begins.map_or_else(|| self.first(), |_| body.load(self.blocks.len()));
            let start = format!("var y = {first};\n");
            Ok(self.elements(body, &start, |body, at| body.store_at(0, at, "y")))
        })
    }

    /// Computes each block's result from a zero state, and the product of its factors.
    fn effects(&self, begins: OperandView<'a>, factors: Option<OperandView<'a>>) -> Result<()> {
        let form = self.form();
        let operands: SmallVec<[(OperandView<'a>, StorageForm); 3]> = self.blocks.iter().map(|b| (*b, form)).collect();
        let outs: SmallVec<[(OperandView<'a>, StorageForm); 2]> =
            [begins].into_iter().chain(factors).map(|p| (p, StorageForm::of(p.dtype))).collect();
        let how = [numcore::Accumulate::Overwrite; 2];
        let walk = ElementwiseKernel::new(self.wgpu, self.name, &operands, &outs)?;
        let kind = (self.name, "scan_effects");
        walk.run(self.wgpu, kind, None, &how[..outs.len()], (&self.numbers(), &self.details()), |body| {
            let start = format!("var y = {};\nvar f = 1f;\n", self.first());
            let linear = self.op == ScanOp::Linear;
            let each = |_: &KernelBody<'_>, _: &str| if linear { "f *= a;\n".to_owned() } else { String::new() };
            let text = self.elements(body, &start, each);
            Ok(text + if linear { "out0 = y;\nout1 = f;\n" } else { "out0 = y;\n" })
        })
    }

    /// Computes the initial value of each block, in place of its effect.
    fn carry(&self, begins: OperandView<'a>, factors: Option<OperandView<'a>>, shape: Shape) -> Result<()> {
        let (last, form) = (shape.rank() - 1, StorageForm::of(begins.dtype));
        let line = |p: OperandView<'a>| Ok((p.seen(p.layout.slice(last, 0, 1, 1)?), form));
        let operands = [begins].into_iter().chain(factors).map(line).collect::<Result<SmallVec<[_; 2]>>>()?;
        let mut walk = ElementwiseKernel::new(self.wgpu, self.name, &operands, &[])?;
        walk.stores(0);
        let numbers = [shape[last] as u32];
        walk.run(self.wgpu, (self.name, "scan_carry"), None, &[], (&numbers, &self.details()), |body| {
            let blocks = body.params.next();
            let effect = body.load_at(0, "p0");
            let factor = if operands.len() > 1 { body.load_at(1, "p1") } else { "1f".into() };
            // A product of factors may be infinite while the state is still 0.
            let next = match self.op {
                ScanOp::Linear => "select(f * y + e, e, y == 0f)".to_owned(),
                _ => self.next("y", "e", ""),
            };
            Ok(format!(
                "var y = {};\nfor (var i = 0u; i < {blocks}; i++) {{\nlet p0 = at0 + i;\nlet p1 = at{} + i;\n\
                 let e = {effect};\nlet f = {factor};\n{}y = {next};\n}}\n",
                self.first(),
                operands.len() - 1,
                body.store_at(0, "p0", "y"),
            ))
        })
    }
}

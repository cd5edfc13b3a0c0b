//! Kernels that visit every position of a shape once: the frame of pointwise programs and of gathers.

use std::fmt::Write;

use numcore::{Accumulate, Layout, LoopAxis, MAX_RANK, Result, coalesce};
use smallvec::{SmallVec, smallvec};

use crate::{
    Wgpu,
    access::{Params, Site, StorageForm, header, offset, unravel},
    bindings::{Bindings, OperandView},
    pipelines::PipelineKey,
    queue::Dispatch,
};

/// The number of invocations of a workgroup.
const GROUP: usize = 64;

/// The sizes of a walk's axes, after adjacent axes were merged.
pub(crate) type LoopSizes = SmallVec<[usize; MAX_RANK]>;
/// An operand's strides along the merged axes.
pub(crate) type LoopStrides = SmallVec<[isize; MAX_RANK]>;

/// Merges axes. Returns their sizes and every operand's strides along them.
pub(crate) fn loops(
    axes: impl Iterator<Item = LoopAxis<SmallVec<[isize; 8]>>>,
    operands: usize,
) -> (LoopSizes, Vec<LoopStrides>) {
    let axes = coalesce(axes, usize::MAX);
    let strides = |k: usize| axes.iter().map(|axis| axis.strides[k]).collect();
    (axes.iter().map(|axis| axis.size).collect(), (0..operands).map(strides).collect())
}

/// The class of an operand's strides along a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StrideClass {
    /// An element that is read at all positions.
    Same,
    /// Contiguous elements.
    Dense,
    /// Strides of any other kind.
    Strided,
}

struct WalkOperand {
    site: Site,
    class: StrideClass,
    base: u32,
    strides: LoopStrides,
}

/// A kernel that walks over a shape: its operands, inputs first, then outputs.
pub(crate) struct ElementwiseKernel<'a> {
    bindings: Bindings<'a>,
    sizes: LoopSizes,
    n: usize,
    operands: SmallVec<[WalkOperand; 8]>,
    inputs: usize,
    /// The elements of one invocation: as many as a word has where an output is written in whole words.
    lanes: u32,
    atomic: SmallVec<[bool; 8]>,
}

/// The context in which a kernel's body is generated.
pub(crate) struct KernelBody<'w> {
    walk: &'w [WalkOperand],
    inputs: usize,
    pub(crate) params: Params,
}

impl KernelBody<'_> {
    /// The value of an input at the present position.
    pub(crate) fn load(&self, input: usize) -> String {
        self.walk[input].site.load(&format!("at{input}"))
    }

    /// The value of an input at another offset.
    pub(crate) fn load_at(&self, input: usize, at: &str) -> String {
        self.walk[input].site.load(at)
    }

    /// Statements that store a value of an operand at an offset.
    pub(crate) fn store_at(&self, k: usize, at: &str, value: &str) -> String {
        self.walk[k].site.store(at, value)
    }

    /// The storage form of an operand.
    pub(crate) fn form(&self, k: usize) -> StorageForm {
        self.walk[k].site.form
    }

    /// The old value of an output at the present position.
    pub(crate) fn old(&self, output: usize) -> String {
        let k = self.inputs + output;
        self.walk[k].site.load(&format!("at{k}"))
    }

    pub(crate) fn out_type(&self, output: usize) -> &'static str {
        self.walk[self.inputs + output].site.form.ty()
    }
}

impl<'a> ElementwiseKernel<'a> {
    /// A kernel over the operands' common shape, which must have elements. Without outputs, the body stores its results
    /// itself.
    pub(crate) fn new(
        wgpu: &Wgpu,
        op: &'static str,
        ins: &[(OperandView<'a>, StorageForm)],
        outs: &[(OperandView<'a>, StorageForm)],
    ) -> Result<ElementwiseKernel<'a>> {
        let views: SmallVec<[OperandView<'a>; 8]> = ins.iter().chain(outs).map(|(p, _)| *p).collect();
        let (bindings, slots) = Bindings::of(&wgpu.queue.device, op, &views)?;
        let shape = *views[0].layout.shape();
        let strides = |i: usize| views.iter().map(|p| p.layout.strides()[i]).collect();
        let axes = (0..shape.rank()).map(|i| LoopAxis { size: shape[i], strides: strides(i) });
        let (sizes, strides) = loops(axes, views.len());
        let forms = ins.iter().chain(outs).map(|(_, f)| *f);
        let mut operands: SmallVec<[WalkOperand; 8]> = SmallVec::new();
        for (((view, form), &slot), strides) in views.iter().zip(forms).zip(&slots).zip(strides) {
            let site = Site { slot, form, atomic: false };
            operands.push(WalkOperand { site, class: class(&strides), base: bindings.base(slot, view), strides });
        }
        let mut walk = ElementwiseKernel {
            n: sizes.iter().product(),
            atomic: smallvec![false; bindings.len()],
            bindings,
            sizes,
            operands,
            inputs: ins.len(),
            lanes: 1,
        };
        counted(wgpu, op, walk.n)?;
        walk.pack();
        Ok(walk)
    }

    /// Binds one more buffer, which is used through atomics; returns its index.
    pub(crate) fn bind(&mut self, buffer: &'a wgpu::Buffer) -> usize {
        self.atomic.push(true);
        self.bindings.add_whole(buffer)
    }

    /// Declares that the body stores elements of input `k`.
    pub(crate) fn stores(&mut self, k: usize) {
        if self.operands[k].site.form.per_word() > 1 {
            self.atomic[self.operands[k].site.slot] = true;
        }
        for o in &mut self.operands {
            o.site.atomic = self.atomic[o.site.slot];
        }
    }

    /// Chooses the outputs that are written in whole words.
    fn pack(&mut self) {
        let packs = |o: &WalkOperand| o.class == StrideClass::Dense && o.base.is_multiple_of(o.site.form.per_word());
        let outs = &self.operands[self.inputs..];
        self.lanes = outs.iter().filter(|o| packs(o)).map(|o| o.site.form.per_word()).max().unwrap_or(1);
        for k in self.inputs..self.operands.len() {
            if self.operands[k].site.form.per_word() > 1 && !self.packed(k) {
                self.atomic[self.operands[k].site.slot] = true;
            }
        }
        for o in &mut self.operands {
            o.site.atomic = self.atomic[o.site.slot];
        }
    }

    fn packed(&self, k: usize) -> bool {
        let o = &self.operands[k];
        let per_word = o.site.form.per_word();
        per_word > 1 && per_word == self.lanes && o.class == StrideClass::Dense && o.base.is_multiple_of(per_word)
    }

    /// The launch parameters: sizes, bases, strides, then those of the caller.
    fn params(&self, more: &[u32]) -> SmallVec<[u32; 64]> {
        let mut params: SmallVec<[u32; 64]> = smallvec![0, self.n as u32];
        params.extend(self.sizes.iter().map(|&d| d as u32));
        for o in &self.operands {
            params.push(o.base);
            if o.class == StrideClass::Strided {
                params.extend(o.strides.iter().map(|&s| s as u32));
            }
        }
        params.extend_from_slice(more);
        params
    }

    fn key(
        &self,
        kind: &'static str,
        program: Option<&numcore::pointwise::Program>,
        how: &[Accumulate],
        more: &[u32],
    ) -> PipelineKey {
        let mut details: SmallVec<[u32; 32]> =
            smallvec![self.sizes.len() as u32, self.lanes, self.bindings.len() as u32];
        for o in &self.operands {
            let bits = (o.site.slot as u32) << 16 | (o.site.form as u32) << 8 | (o.class as u32) << 1;
            details.push(bits | u32::from(o.site.atomic));
        }
        for (k, how) in how.iter().enumerate() {
            details.push(u32::from(*how == Accumulate::Add) << 1 | u32::from(self.packed(self.inputs + k)));
        }
        details.extend_from_slice(more);
        PipelineKey { kind, program: program.cloned(), details }
    }

    /// Runs the kernel. `body` writes statements that set `out0 …` for the element at `index`. `numbers` are its own
    /// launch parameters, and `details` are the rest on which its source depends.
    pub(crate) fn run(
        self,
        wgpu: &Wgpu,
        (op, kind): (&'static str, &'static str),
        program: Option<&numcore::pointwise::Program>,
        how: &[Accumulate],
        (numbers, details): (&[u32], &[u32]),
        body: impl FnOnce(&mut KernelBody<'_>) -> Result<String>,
    ) -> Result<()> {
        let params = self.params(numbers);
        let key = self.key(kind, program, how, details);
        let groups = self.n.div_ceil(GROUP * self.lanes as usize);
        let ElementwiseKernel { bindings, .. } = &self;
        let count = bindings.len();
        let text = Text { sizes: self.sizes.len(), lanes: self.lanes, operands: &self.operands, inputs: self.inputs };
        let packed: SmallVec<[bool; 8]> = (self.inputs..self.operands.len()).map(|k| self.packed(k)).collect();
        let source = || text.source(&header(&self.atomic[..count], params.len()), how, &packed, body);
        // The source borrows the operands, and the launch takes the bindings.
        let launch = Dispatch { op, key, bindings: self.bindings, params: &params, groups, work: 0 };
        wgpu.queue.launch(launch, source)
    }
}

/// Refuses a number of elements that a kernel cannot count.
pub(crate) fn counted(wgpu: &Wgpu, op: &'static str, n: usize) -> Result<()> {
    match u32::try_from(n) {
        Ok(_) => Ok(()),
        Err(_) => {
            let why = format!("{n} elements; its kernels count fewer than 2³²: use smaller tensors");
            Err(wgpu.queue.device.unsupported(op, why))
        }
    }
}

fn class(strides: &[isize]) -> StrideClass {
    match strides {
        _ if strides.iter().all(|&s| s == 0) => StrideClass::Same,
        [1] => StrideClass::Dense,
        _ => StrideClass::Strided,
    }
}

/// The properties of a kernel on which its source depends.
struct Text<'w> {
    sizes: usize,
    lanes: u32,
    operands: &'w [WalkOperand],
    inputs: usize,
}

impl Text<'_> {
    fn source(
        &self,
        header: &str,
        how: &[Accumulate],
        packed: &[bool],
        body: impl FnOnce(&mut KernelBody<'_>) -> Result<String>,
    ) -> Result<String> {
        let mut params = Params::new();
        let n = params.next();
        let sizes = params.many(self.sizes);
        let strided = self.operands.iter().any(|o| o.class == StrideClass::Strided);
        let mut inside = if strided { unravel("c", "index", &sizes) } else { String::new() };
        for (k, o) in self.operands.iter().enumerate() {
            let base = params.next();
            let at = match o.class {
                StrideClass::Same => base.clone(),
                StrideClass::Dense => format!("{base} + index"),
                StrideClass::Strided => offset(&base, "c", &params.many(self.sizes)),
            };
            // Writing to a String cannot fail, here and below.
            let _ = writeln!(inside, "let at{k} = {at};");
        }
        let mut told = KernelBody { walk: self.operands, inputs: self.inputs, params };
        let body = body(&mut told)?;
        for k in 0..how.len() {
            let _ = writeln!(inside, "var out{k}: {};", told.out_type(k));
        }
        inside += &body;
        let (mut before, mut after) = (String::new(), String::new());
        for (k, (how, packed)) in how.iter().zip(packed).enumerate() {
            let site = self.operands[self.inputs + k].site;
            let value = site.form.accumulate(*how, &told.old(k), &format!("out{k}"));
            if !packed {
                inside += &site.store(&format!("at{}", self.inputs + k), &value);
                continue;
            }
            let bits = 32 / site.form.per_word();
            before += &format!("var word{k} = 0u;\n");
            inside += &format!("word{k} |= {} << ({bits}u * lane);\n", site.form.encode(&value));
            after += &self.whole_word(k, &n);
        }
        let lanes = self.lanes;
        Ok(format!(
            "{header}@compute @workgroup_size({GROUP})\n\
             fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, \
             @builtin(local_invocation_index) local: u32) {{\n\
             wg_zero = P[0].x;\n\
             let task = group.y * groups.x + group.x;\n\
             if (task > ({n} - 1u) / {}u) {{ return; }}\n\
             let first = (task * {GROUP}u + local) * {lanes}u;\n\
             if (first >= {n}) {{ return; }}\n\
             {before}for (var lane = 0u; lane < min({lanes}u, {n} - first); lane++) {{\n\
             let index = first + lane;\n{inside}}}\n{after}}}\n",
            // The last workgroups of a grid may have no elements, and indices beyond 2³².
            GROUP as u32 * lanes,
        ))
    }

    /// Stores a word of a packed output. Of the last word, it changes only the bits of elements of the output.
    fn whole_word(&self, k: usize, n: &str) -> String {
        let site = self.operands[self.inputs + k].site;
        let slot = site.slot;
        let base = self.base(self.inputs + k);
        let bits = 32 / site.form.per_word();
        let (lanes, at) = (self.lanes, format!("({base} + first) / {}u", self.lanes));
        let (old, set) = if site.atomic {
            (format!("atomicLoad(&buf{slot}[{at}])"), format!("atomicStore(&buf{slot}[{at}], word{k});"))
        } else {
            (format!("buf{slot}[{at}]"), format!("buf{slot}[{at}] = word{k};"))
        };
        format!(
            "if ({n} - first < {lanes}u) {{ word{k} |= {old} & (0xffffffffu << ({bits}u * ({n} - first))); }}\n{set}\n"
        )
    }

    /// The launch parameter with an operand's base.
    fn base(&self, k: usize) -> String {
        let mut params = Params::new();
        params.many(1 + self.sizes);
        for o in &self.operands[..k] {
            params.many(if o.class == StrideClass::Strided { 1 + self.sizes } else { 1 });
        }
        params.next()
    }
}

/// The layout with axis `axis` of length `size` and stride 0, at the axis's first position.
pub(crate) fn still(layout: &Layout, axis: usize, size: usize) -> Result<Layout> {
    layout.slice(axis, 0, 1, 1)?.broadcast_to(layout.shape().with(axis, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The last row of a grid of workgroups may go beyond 2³² bytes, where the indices of a kernel start again at 0.
    #[test]
    fn workgroups_without_elements_end_before_they_index() {
        let byte = |base| WalkOperand {
            site: Site { slot: 0, form: StorageForm::U8, atomic: false },
            class: StrideClass::Dense,
            base,
            strides: smallvec![1],
        };
        let operands = [byte(0), byte(0)];
        let text = Text { sizes: 1, lanes: 4, operands: &operands, inputs: 1 };
        let source = text.source("", &[Accumulate::Overwrite], &[true], |body| Ok(body.load(0))).expect("a source");
        let [end, index] = ["if (task > (P[0].y - 1u) / 256u) { return; }", "let first = (task * 64u + local) * 4u;"];
        let at = |line: &str| source.find(line).unwrap_or_else(|| panic!("no `{line}` in\n{source}"));
        assert!(at(end) < at(index));
    }
}

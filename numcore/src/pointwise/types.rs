//! Typing: every value of a program gets one dtype, and nothing is promoted.
//!
//! Values that must have one dtype form a group (union-find). Inputs determine dtypes; constants, scalars and positions
//! take the dtype of the operands they are combined with. Equal constants are shared when a program is built, so a
//! `1.0` could tie an `f32` expression to an `f64` one. Each group therefore gets its own copy of the constants it
//! reads ([`split`]).

use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;

use super::{Const, Id, Inst, OpClass, Program};
use crate::{DType, Error, Result};

/// The dtypes of a program's values, for given inputs.
#[derive(Debug, PartialEq, Eq)]
pub struct Typed {
    /// The dtype of each value.
    pub dtypes: Vec<DType>,
}

/// A cache of typings: a list that only grows, so that reading takes no lock.
#[derive(Default)]
pub(super) struct TypingCache(OnceLock<Box<Cached>>);

struct Cached {
    inputs: SmallVec<[DType; 8]>,
    outputs: SmallVec<[Option<DType>; 4]>,
    typed: Arc<Typed>,
    next: TypingCache,
}

impl Program {
    /// Infers the dtype of every value from the dtypes of the inputs and, if known, of the outputs (`&[]`: no output is
    /// known).
    ///
    /// A value that is combined with no typed value takes the required dtype of the output it reaches. Without one, it
    /// takes that of the cast that reads it. Otherwise it is `i64` if it is made of positions or integers, and `f32` if
    /// not. Results are cached: a repeated call allocates nothing and takes no lock.
    ///
    /// # Errors
    /// Fails if dtypes that must agree do not, or if an op does not take a dtype.
    pub fn resolve(&self, inputs: &[DType], outputs: &[Option<DType>]) -> Result<Arc<Typed>> {
        self.typed(inputs, outputs).cloned()
    }

    /// The dtypes of this program's values by reference, cached for the program's lifetime.
    pub(crate) fn typed(&self, inputs: &[DType], outputs: &[Option<DType>]) -> Result<&Arc<Typed>> {
        let mut cache = &self.0.typed;
        loop {
            while let Some(c) = cache.0.get() {
                if c.inputs[..] == *inputs && c.outputs[..] == *outputs {
                    return Ok(&c.typed);
                }
                cache = &c.next;
            }
            let typed = Arc::new(infer(self, inputs, outputs)?);
            // The search continues after the slot if another thread filled it first.
            let _ = cache.0.set(Box::new(Cached {
                inputs: inputs.into(),
                outputs: outputs.into(),
                typed,
                next: TypingCache::default(),
            }));
        }
    }
}

/// A set of dtypes.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Set(u16);

impl Set {
    const ANY: Set = Set((1 << DType::ALL.len()) - 1);

    fn one(d: DType) -> Set {
        Set(1 << d as u16)
    }

    fn of(class: OpClass) -> Set {
        DType::ALL.into_iter().filter(|d| class.takes(*d)).fold(Set(0), |s, d| Set(s.0 | Set::one(d).0))
    }

    fn has(self, d: DType) -> bool {
        self.0 & Set::one(d).0 != 0
    }

    fn only(self) -> Option<DType> {
        DType::ALL.into_iter().find(|d| self == Set::one(*d))
    }

    fn words(self) -> &'static str {
        let classes =
            [(OpClass::Float, "a floating type"), (OpClass::Int, "an integer type"), (OpClass::Number, "a number")];
        let class = classes.into_iter().find(|(class, _)| Set::of(*class) == self).map(|(_, words)| words);
        self.only().map(DType::name).or(class).unwrap_or("an integer type or bool")
    }
}

/// A conflict: two sets that have no dtype in common.
type Conflict = [Set; 2];
type Met = std::result::Result<(), Conflict>;

#[derive(Clone, Copy)]
struct TypeGroup {
    allowed: Set,
    /// True if positions or integers are among the group's values, whose default dtype is `i64`.
    whole: bool,
    members: u32,
}

/// Groups of values that must have one dtype.
struct TypeGroups {
    parent: Vec<Id>,
    of: Vec<TypeGroup>,
}

impl TypeGroups {
    fn new(values: usize) -> TypeGroups {
        let alone = TypeGroup { allowed: Set::ANY, whole: false, members: 1 };
        TypeGroups { parent: (0..values as Id).collect(), of: vec![alone; values] }
    }

    fn root(&mut self, mut i: Id) -> usize {
        while self.parent[i as usize] != i {
            let up = self.parent[self.parent[i as usize] as usize];
            self.parent[i as usize] = up;
            i = up;
        }
        i as usize
    }

    fn limit(&mut self, i: Id, to: Set) -> Met {
        let root = self.root(i);
        let had = self.of[root].allowed;
        self.of[root].allowed = Set(had.0 & to.0);
        if self.of[root].allowed == Set(0) { Err([had, to]) } else { Ok(()) }
    }

    fn unite(&mut self, a: Id, b: Id) -> Met {
        let (a, b) = (self.root(a), self.root(b));
        if a == b {
            return Ok(());
        }
        let (x, y) = (self.of[a], self.of[b]);
        self.parent[b] = a as Id;
        let allowed = Set(x.allowed.0 & y.allowed.0);
        self.of[a] = TypeGroup { allowed, whole: x.whole || y.whole, members: x.members + y.members };
        if allowed == Set(0) { Err([x.allowed, y.allowed]) } else { Ok(()) }
    }

    fn whole(&mut self, i: Id, allowed: Set) -> Met {
        let root = self.root(i);
        self.of[root].whole = true;
        self.limit(i, allowed)
    }

    /// Applies the constraints of value `i` on its own dtype and on those of its operands.
    fn visit(&mut self, i: Id, inst: Inst, inputs: Option<&[DType]>) -> Met {
        match inst {
            Inst::Input(k) => self.limit(i, inputs.map_or(Set::ANY, |types| Set::one(types[k as usize]))),
            Inst::Scalar(_) => Ok(()),
            Inst::Const(Const::Float(_)) => self.limit(i, Set::of(OpClass::Float)),
            Inst::Const(Const::Int(_)) => self.whole(i, Set::ANY),
            Inst::Const(Const::Bool(_)) => self.limit(i, Set::one(DType::Bool)),
            Inst::Index => self.whole(i, Set::of(OpClass::Number)),
            Inst::Random { .. } => self.limit(i, Set::one(DType::U32)),
            Inst::Unary(op, a) => self.limit(a, Set::of(op.class())).and_then(|()| self.unite(a, i)),
            Inst::Binary(op, a, b) => {
                self.limit(a, Set::of(op.class()))?;
                self.unite(a, b)?;
                if op.is_comparison() { self.limit(i, Set::one(DType::Bool)) } else { self.unite(a, i) }
            }
            Inst::Select(c, a, b) => {
                self.limit(c, Set::one(DType::Bool))?;
                self.limit(a, Set::of(OpClass::Any))?;
                self.unite(a, b)?;
                self.unite(a, i)
            }
            Inst::Cast(to, _) => self.limit(i, Set::one(to)),
            Inst::CastLike(_, like) => self.unite(like, i),
        }
    }

    /// Gives a value that is cast to `d` that dtype directly. Integer arithmetic stays integer: `7 / 2` must not become
    /// 3.5.
    fn suggest(&mut self, i: Id, d: DType) {
        let root = self.root(i);
        let TypeGroup { allowed, whole, members } = self.of[root];
        if allowed.only().is_none() && allowed.has(d) && (members == 1 || !whole || d.is_int()) {
            self.of[root].allowed = Set::one(d);
        }
    }

    /// The dtype of a value, with a default if no typed value determines it.
    fn resolve_type(&mut self, i: Id) -> DType {
        let root = self.root(i);
        let TypeGroup { allowed, whole, .. } = self.of[root];
        let first = if whole { [DType::I64, DType::F32] } else { [DType::F32, DType::I64] };
        // A group that neither default fits has one dtype left, or is `bool`.
        let d = allowed.only().or(first.into_iter().find(|d| allowed.has(*d))).unwrap_or(DType::Bool);
        self.of[root].allowed = Set::one(d);
        d
    }
}

fn infer(program: &Program, inputs: &[DType], outputs: &[Option<DType>]) -> Result<Typed> {
    check_counts(program, inputs, outputs)?;
    let insts = program.insts();
    let mut groups = TypeGroups::new(insts.len());
    for (i, &inst) in insts.iter().enumerate() {
        groups.visit(i as Id, inst, Some(inputs)).map_err(|c| refused(program, inst, c))?;
    }
    for (k, (&o, asked)) in program.outputs().iter().zip(outputs).enumerate() {
        if let Some(d) = asked {
            groups.limit(o, Set::one(*d)).map_err(|c| misfit(program, k, c))?;
        }
    }
    for inst in insts {
        if let Inst::Cast(to, a) = *inst {
            groups.suggest(a, to);
        }
    }
    for inst in insts {
        if let Inst::CastLike(a, like) = *inst {
            let d = groups.resolve_type(like);
            groups.suggest(a, d);
        }
    }
    Ok(Typed { dtypes: (0..insts.len() as Id).map(|i| groups.resolve_type(i)).collect() })
}

/// Gives every group its own copy of the constants, scalars and positions it reads.
pub(super) fn split(insts: &[Inst], outputs: &[Id]) -> (Vec<Inst>, Vec<Id>) {
    let (insts, outputs) = unshare(insts, outputs);
    let mut groups = TypeGroups::new(insts.len());
    for (i, &inst) in insts.iter().enumerate() {
        // Conflicts are reported by `resolve`; here only the grouping counts.
        let _ = groups.visit(i as Id, inst, None);
    }
    let mut kept: Vec<Inst> = Vec::with_capacity(insts.len());
    let mut number: Vec<Id> = Vec::with_capacity(insts.len());
    let mut leaves: Vec<(Inst, usize, Id)> = Vec::new();
    for (i, inst) in insts.iter().enumerate() {
        let root = groups.root(i as Id);
        let known = leaves.iter().find(|(leaf, group, _)| leaf == inst && *group == root);
        number.push(known.map_or(kept.len() as Id, |(.., id)| *id));
        if known.is_none() {
            if weak(*inst) {
                leaves.push((*inst, root, kept.len() as Id));
            }
            kept.push(inst.map(|a| number[a as usize]));
        }
    }
    (kept, outputs.iter().map(|&o| number[o as usize]).collect())
}

/// Copies each leaf whose dtype no input determines, once for each of its readers.
fn unshare(insts: &[Inst], outputs: &[Id]) -> (Vec<Inst>, Vec<Id>) {
    let mut all: Vec<Inst> = Vec::with_capacity(2 * insts.len());
    let mut number: Vec<Id> = vec![0; insts.len()];
    for (i, inst) in insts.iter().enumerate().filter(|(_, inst)| !weak(**inst)) {
        let inst = inst.map(|a| read(insts, &number, &mut all, a));
        number[i] = all.len() as Id;
        all.push(inst);
    }
    let outputs = outputs.iter().map(|&o| read(insts, &number, &mut all, o)).collect();
    (all, outputs)
}

fn read(insts: &[Inst], number: &[Id], all: &mut Vec<Inst>, a: Id) -> Id {
    if !weak(insts[a as usize]) {
        return number[a as usize];
    }
    all.push(insts[a as usize]);
    all.len() as Id - 1
}

fn weak(inst: Inst) -> bool {
    matches!(inst, Inst::Scalar(_) | Inst::Const(_) | Inst::Index)
}

fn check_counts(program: &Program, inputs: &[DType], outputs: &[Option<DType>]) -> Result<()> {
    let (i, o) = (program.inputs(), program.outputs().len());
    super::require_count(program.name(), "number of types of inputs", inputs.len(), i)?;
    if !outputs.is_empty() {
        super::require_count(program.name(), "number of types of outputs", outputs.len(), o)?;
    }
    if i > Program::MAX_INPUTS {
        let allowed = format!("at most {} to be bound", Program::MAX_INPUTS);
        return Err(Error::range(program.name(), "number of inputs", i, allowed));
    }
    Ok(())
}

fn refused(program: &Program, inst: Inst, conflict: Conflict) -> Error {
    let (op, [had, to]) = (inst.name(), conflict);
    if let Some(stored) = had.only().filter(|d| d.is_storage()) {
        return stored_only(program.name(), stored);
    }
    let why = match (had.only(), to.only()) {
        (Some(a), Some(b)) => {
            format!("`{op}` meets {a} and {b}, and nothing is promoted silently; cast one with `to_dtype`")
        }
        _ => format!("`{op}` meets {} where it needs {}; cast with `to_dtype`", had.words(), to.words()),
    };
    Error::dtype(program.name(), &conflict.into_iter().filter_map(Set::only).collect::<Vec<_>>(), why)
}

/// The error for arithmetic on an 8-bit float.
pub(crate) fn stored_only(op: &'static str, dtype: DType) -> Error {
    Error::dtype(op, &[dtype], format!("{dtype} is stored and moved, not computed in: cast it first, with `to_dtype`"))
}

fn misfit(program: &Program, output: usize, [had, to]: Conflict) -> Error {
    let why = format!("output {output} is {}, {} is asked for; cast with `to_dtype`", had.words(), to.words());
    Error::dtype(program.name(), &[had, to].into_iter().filter_map(Set::only).collect::<Vec<_>>(), why)
}

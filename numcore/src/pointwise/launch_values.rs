//! The values of a program that are equal for all elements: computed once per launch, or read from memory.

use smallvec::SmallVec;

use super::{Id, Inst, Number, Program, ProgramBuilder, Typed};
use crate::{DType, Error, Result, Scalar};

impl Program {
    /// The values that a printed body takes as `s0, s1 …`: equal for all elements, not constant, and either outputs or
    /// read by an element-dependent value. A runtime computes them once per launch by
    /// [`eval_uniform`](Program::eval_uniform).
    pub fn launch_values(&self) -> Vec<Id> {
        let uniform = self.uniform();
        let readers =
            self.insts().iter().zip(&uniform).filter(|(_, same)| !**same).flat_map(|(inst, _)| inst.operands());
        let mut ids: Vec<Id> = readers.chain(self.outputs().iter().copied()).collect();
        ids.retain(|&id| uniform[id as usize] && !matches!(self.insts()[id as usize], Inst::Const(_)));
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// The [`launch_values`](Program::launch_values) for these scalars, not rounded to their dtypes.
    pub fn launch_numbers(&self, typed: &Typed, scalars: &[Scalar]) -> SmallVec<[Number; 8]> {
        let known = self.eval_uniform(typed, scalars);
        // Every launch value is uniform, so it is known.
        self.launch_values().iter().map(|&id| known[id as usize].unwrap_or(Number::Int(0))).collect()
    }

    /// This program without scalars: each of its [`launch_values`](Program::launch_values) becomes a further input of
    /// dtype `dtype`. The results have the same bits. It serves values in memory that change between launches, as in a
    /// captured step.
    ///
    /// # Errors
    /// Fails if the program draws random bits, whose key is a scalar, or if a launch value is a float of another dtype
    /// than `dtype`.
    pub fn with_launch_values_in_memory(&self, typed: &Typed, dtype: DType) -> Result<Program> {
        let values = self.launch_values();
        let builder = ProgramBuilder::default();
        let mut at: Vec<Id> = Vec::with_capacity(self.insts().len());
        for (id, &inst) in self.insts().iter().enumerate() {
            let own = typed.dtypes[id];
            at.push(match (values.iter().position(|&v| v as usize == id), inst) {
                (None, Inst::Random { .. }) => {
                    return Err(Error::unsupported(
                        self.name(),
                        "it draws random bits, whose key is no value in memory",
                    ));
                }
                (None, _) => builder.push(inst.map(|a| at[a as usize])),
                (Some(k), _) => {
                    let input = builder.input((self.inputs() + k) as u16);
                    match own {
                        _ if own == dtype => input.id(),
                        _ if own.is_float() => {
                            let why = format!("a value of it is {own}, and values in memory are {dtype}");
                            return Err(Error::dtype(self.name(), &[own, dtype], why));
                        }
                        _ => input.cast(own).id(),
                    }
                }
            });
        }
        let outputs: Vec<_> = self.outputs().iter().map(|&o| builder.expr(at[o as usize])).collect();
        Ok(builder.finish(self.name(), self.inputs() + values.len(), 0, &outputs))
    }
}

//! Tangents: the forward mode of differentiation. A variable carries the derivative of its value along a direction, and
//! an op call applies the rules of [`tangents`] beside the op itself. Tangents are variables, so the tape records them.

use std::sync::Arc;

use numcore::{
    Error, Result, Runtime, Within,
    ops::{Apply, Op, Outs, Rule, tangents},
};
use smallvec::SmallVec;

use crate::{
    Var,
    node::{Dual, TapeValue},
};

impl<R: Runtime> Var<R> {
    /// This value with `tangent`, its derivative along a direction. Values computed from it have tangents too, those of
    /// the forward mode; see [`jvp`](crate::jvp).
    ///
    /// # Errors
    /// An error if `tangent` differs in shape or dtype, the dtype is not floating-point, or there is a tangent already.
    #[doc(alias("make_dual", "dual"))]
    #[track_caller]
    pub fn with_tangent(&self, tangent: &Var<R>) -> Result<Var<R>> {
        let (is, given) = (self.spec(), tangent.spec());
        if !is.dtype.is_float() {
            return Err(Error::dtype("with_tangent", &[is.dtype], "only floating types have derivatives")).at_caller();
        }
        if is != given {
            let why = format!("a tangent is {} {} as its value, this one is {}", is.dtype, is.shape, given.dtype);
            return Err(Error::shape("with_tangent", &[is.shape, given.shape], why)).at_caller();
        }
        if self.dual().is_some() || tangent.dual().is_some() {
            let why = "tangents do not nest; for second derivatives differentiate the tangent with `grad`";
            return Err(Error::usage("with_tangent", why)).at_caller();
        }
        Ok(self.clone().with(tangent.clone()))
    }

    /// The derivative of this value along the direction that [`with_tangent`](Var::with_tangent) gave; `None` if the
    /// value does not depend on it.
    #[doc(alias("unpack_dual"))]
    pub fn tangent(&self) -> Option<Var<R>> {
        self.dual().map(|dual| dual.tangent.clone())
    }

    /// This value without its tangent.
    pub(crate) fn primal(&self) -> Self {
        Var { value: self.value.plain().clone(), edge: self.edge.clone() }
    }

    fn with(self, tangent: Var<R>) -> Self {
        Var { value: TapeValue::Dual(Arc::new(Dual { value: self.value, tangent })), edge: self.edge }
    }

    fn dual(&self) -> Option<&Dual<R>> {
        if let TapeValue::Dual(dual) = &self.value { Some(dual) } else { None }
    }

    /// Applies an op to inputs of which some have tangents.
    #[track_caller]
    pub(crate) fn applied_along(op: Op, ins: &[&Self]) -> Result<Outs<Self>> {
        if let Op::Fused(fused) = &op {
            return fused.decompose(ins);
        }
        let primals: SmallVec<[Self; 4]> = ins.iter().map(|v| v.primal()).collect();
        let primals: SmallVec<[&Self; 4]> = primals.iter().collect();
        let given: SmallVec<[Option<&Self>; 4]> = ins.iter().map(|v| v.dual().map(|dual| &dual.tangent)).collect();
        let outs = Self::applied(op.clone(), &primals)?;
        let found = tangents(&op, &primals, &outs, &given)
            .map_err(|error| error.within(format!("tangent of {}", op.name())))?;
        Ok(outs
            .into_iter()
            .zip(found)
            .map(|(out, tangent)| match tangent {
                Some(tangent) => out.with(tangent),
                None => out,
            })
            .collect())
    }
}

/// Checks that no input of a handwritten function has a tangent, for which the function has no rule.
#[track_caller]
pub(crate) fn no_tangents<R: Runtime>(name: &'static str, ins: &[&Var<R>]) -> Result<()> {
    if ins.iter().all(|v| v.dual().is_none()) {
        return Ok(());
    }
    let why = "a handwritten function has no rule for tangents; use the reverse mode, `grad`";
    Err(Error::unsupported(name, why)).at_caller()
}

//! Programs that were printed as Rust and compiled ahead: one loop over the operands, where the interpreter takes a pass over a
//! block per step, and computes or waits for memory by turns.
//!
//! The interpreter remains the definition: the same functions and the same fused products, so the same bits. `hot.rs` is the list;
//! `cargo xtask hot` writes it. On it is what ran at least 1.1 times as fast; programs of one step did not.

use numcore::{DType, pointwise::Program};

use super::{
    form::{Form, Output},
    hot,
};
use crate::Simd;

/// Computes `n` elements; slots are a kernel's: numbers, inputs, outputs.
///
/// # Safety
/// The slots name `n` elements (of numbers: one) of `f32`, aligned; nothing else writes inputs or sees outputs meanwhile.
pub(super) type Body = unsafe fn(simd: Simd, slots: &[*mut u8], n: usize);

/// A program over `f32`.
pub(super) struct Compiled {
    pub hash: u64,
    /// For every input: which output's old value it is, if one's.
    pub own: &'static [Option<u16>],
    pub body: Body,
}

/// The compiled form of a program that meets its operands this way.
pub(super) fn find(program: &Program, form: &Form) -> Option<Body> {
    let plain = form.inputs.iter().all(|t| *t == DType::F32)
        && form.outputs.iter().all(|o| *o == Output::Overwrite(DType::F32));
    let same = |c: &&Compiled| c.hash == program.hash() && *c.own == form.own[..];
    hot::ALL.iter().find(same).filter(|_| plain).map(|c| c.body)
}

/// Programs as the generator writes them: a name and its hash, which slot each number, input and output is, inputs that are old
/// values of outputs, and the printed body.
macro_rules! compiled {
    ($(
        $name:ident $hash:literal own [$($own:expr),*] {
            numbers $($number:ident $number_at:literal)*;
            reads $($input:ident $input_at:literal)*;
            updates $($old:ident $of:ident)*;
            writes $($out:ident $to:ident $out_at:literal)*;
        }
        $body:block
    )*) => {
        pub(super) static ALL: &[$crate::pointwise::compiled::Compiled] = &[
            $($crate::pointwise::compiled::Compiled { hash: $hash, own: &[$($own),*], body: $name }),*
        ];
        $(
            /// # Safety
            /// As [`Body`](super::compiled::Body) says.
            unsafe fn $name(simd: $crate::Simd, slots: &[*mut u8], n: usize) {
                $crate::simd::leveled! {
                    fn body(n: usize, $($number: f32,)* $($input: &[f32],)* $($to: &mut [f32],)*) {
                        $(let $input = &$input[..n];)*
                        $(let $to = &mut $to[..n];)*
                        for i in 0..n {
                            $(let $input = $input[i];)*
                            $(let $old = $of[i];)*
                            $(let $out;)*
                            $body
                            $($to[i] = $out;)*
                        }
                    }
                }
                // SAFETY: the caller's promise; an input that is an output's old value is read through that output alone.
                unsafe {
                    body(
                        simd,
                        n,
                        $(*slots[$number_at].cast::<f32>(),)*
                        $(std::slice::from_raw_parts(slots[$input_at].cast::<f32>(), n),)*
                        $(std::slice::from_raw_parts_mut(slots[$out_at].cast::<f32>(), n),)*
                    );
                }
            }
        )*
    };
}
pub(super) use compiled;

#[cfg(test)]
mod tests {
    use super::*;

    fn form(own: &[Option<u16>], t: DType, outputs: usize) -> Form {
        let mut form = Form::default();
        own.iter().for_each(|own| form.input(t, *own));
        (0..outputs).for_each(|_| form.output(numcore::Accumulate::Overwrite, t));
        form
    }

    #[test]
    fn what_is_found_is_the_program_over_floats_with_these_owners() {
        let gelu = Program::new("any name", |[x], []| [x.gelu()]);
        assert!(find(&gelu, &form(&[None], DType::F32, 1)).is_some());
        assert!(find(&gelu, &form(&[Some(0)], DType::F32, 1)).is_none());
        assert!(find(&gelu, &form(&[None], DType::F64, 1)).is_none());
        let other = Program::new("gelu", |[x], []| [x.gelu() * 0.5]);
        assert!(find(&other, &form(&[None], DType::F32, 1)).is_none());
    }

    #[test]
    fn no_program_is_listed_twice() {
        for (i, a) in hot::ALL.iter().enumerate() {
            assert!(!hot::ALL[..i].iter().any(|b| (a.hash, a.own) == (b.hash, b.own)));
        }
    }
}

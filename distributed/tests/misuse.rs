//! What must not compile, here and in `comm`: each file of `misuse/` is a mistake, with what the compiler says about it beside it. (One program for both:
//! each builds what it depends on.)
#![allow(missing_docs)]

#[test]
fn mistakes_do_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/misuse/*.rs");
}

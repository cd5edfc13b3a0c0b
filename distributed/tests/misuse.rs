//! What must not compile, here and in `comm`: each file of `misuse/` is a mistake, and the file of its name ending in `.stderr` has the compiler's message. (One program for both:
//! each builds what it depends on.)
#![allow(missing_docs)]

#[test]
fn mistakes_do_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/misuse/*.rs");
}

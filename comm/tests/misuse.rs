//! What must not compile: each file of `misuse/` is a mistake, with what the compiler says about it beside it.
#![allow(missing_docs)]

#[test]
fn mistakes_do_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/misuse/*.rs");
}

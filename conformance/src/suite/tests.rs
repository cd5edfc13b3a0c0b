//! The suite as tests, one for each section, so that a runtime's test program names failures and runs sections in
//! parallel.

/// A test for every section that calls `$check` with the section's name; or for those that are named.
///
/// ```
/// fn section(name: &str) {
///     let (_, run) = *conformance::sections::<MyRuntime>().iter().find(|(n, _)| *n == name).expect("a section");
///     let section = run(&MyRuntime::new());
///     assert!(section.failures.is_empty(), "{:?}", section.failures);
/// }
///
/// conformance::section_tests!(section);
/// # use numcore::NullRuntime as MyRuntime;
/// # fn main() {}
/// ```
#[macro_export]
macro_rules! section_tests {
    ($check:path) => {
        $crate::section_tests! {
            @complete $check:
            reference_values "references",
            gradients "gradients",
            second_derivatives "second derivatives",
            tangents "tangents",
            views "views",
            repeated_axes "repeated axes",
            accumulation_in_slots "slots",
            narrow_types "narrow types",
            fused_kernels "fused kernels",
            attention_and_positions "attention and positions",
            sizes "sizes",
            functions "functions",
            copies_and_casts "copies and casts",
            outputs "outputs",
            program_layouts "program layouts",
            reductions "reductions",
            softmax_rows "softmax",
            index "index",
            scans_and_sorts "scans and sorts",
            matrix_products "matmul",
            windows "windows",
            random_geometry "geometry",
            chains_of_views "chains",
            values "values",
            numerics "numerics",
            handle "handle",
            random_programs "programs",
            exactness "exactness",
            empty_tensors "empty tensors",
            errors "errors",
            misuse "misuse",
        }
    };
    (@complete $check:path: $($test:ident $section:literal,)*) => {
        $crate::section_tests!($check: $($test $section,)*);

        #[test]
        fn no_section_is_left_out() {
            assert_eq!($crate::section_names(), [$($section,)*]);
        }
    };
    ($check:path: $($test:ident $section:literal),* $(,)?) => {
        $(#[test] fn $test() { $check($section); })*
    };
}

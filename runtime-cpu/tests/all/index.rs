//! An index out of range is an error of the call, which names the index, its position and the caller's line.

use numcore::{
    DType, ErrorKind, Tensor,
    ops::{IndexOps, ViewOps},
};
use runtime_cpu::Cpu;

#[test]
fn an_index_out_of_range_is_an_error_that_names_it() {
    let cpu = Cpu::with_threads(2);
    let x = Tensor::ones(&cpu, [4, 3], DType::F32).unwrap();
    for (bad, at) in [(4i64, 1), (-1, 0), (i64::MAX, 2), (i64::MIN, 2)] {
        let mut ids = vec![0i64; 3];
        ids[at] = bad;
        let index = Tensor::from_vec(&cpu, ids).unwrap();
        for e in
            [x.index_select(0, &index).unwrap_err(), x.index_add(0, &index, &x.narrow(0, 0, 3).unwrap()).unwrap_err()]
        {
            assert!(matches!(e.kind(), ErrorKind::Index { size: Some(4), .. }));
            let text = e.to_string();
            assert!(text.contains(&format!("index {bad} at position [{at}, 0]")) && text.contains("0..4"), "{text}");
        }
    }
    let none = Tensor::from_vec(&cpu, Vec::<i64>::new()).unwrap();
    assert_eq!(x.index_select(0, &none).unwrap().dims(), [0, 3]);
    let empty = Tensor::ones(&cpu, [0, 3], DType::F32).unwrap();
    assert!(empty.index_select(0, &Tensor::from_vec(&cpu, vec![0i64]).unwrap()).is_err());
}

/// The position of an index out of range is reported in terms of the caller's tensor, not of its reshaped form.
#[test]
fn errors_of_embedding_and_one_hot_name_the_position_given() {
    let cpu = Cpu::with_threads(2);
    let table = Tensor::ones(&cpu, [4, 3], DType::F32).unwrap();
    let ids = Tensor::from_slice(&cpu, [2, 5], &[0i64, 1, 2, 3, 0, 1, 2, 77, 0, 1]).unwrap();
    let says = |error: numcore::Error, start: &str| {
        let text = error.to_string();
        assert!(text.starts_with(start) && text.contains("runtime-cpu/tests/all/index.rs"), "{text}");
    };
    let error = table.embedding(&ids).unwrap_err();
    says(error, "embedding: index 77 at position [1, 2] of the index [2, 5] is not in 0..4");
    let error = ids.one_hot(4).unwrap_err();
    says(error, "one_hot: index 77 at position [1, 2] of the index [2, 5] is not in 0..4");
    let error = ids.narrow(1, 0, 2).unwrap().one_hot(1).unwrap_err();
    says(error, "one_hot: index 1 at position [0, 1] of the index [2, 2] is not in 0..1");
}

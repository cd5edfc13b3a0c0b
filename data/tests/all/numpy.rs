//! NumPy's files: arrays that it wrote, in every element type and order, and files that are refused.

use std::fs;

use data::{
    Array, Dataset, Loader,
    sources::{NpyRows, read_npy, read_npz},
};
use numcore::DType;

use crate::{common::Folder, references};

/// A file of version 1 with this header and these bytes of elements.
fn npy(header: &str, bytes: &[u8]) -> Vec<u8> {
    [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), bytes].concat()
}

fn header(kind: &str, fortran: &str, shape: &str) -> String {
    format!("{{'descr': {kind}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n")
}

#[test]
fn arrays_of_every_type_and_order() {
    let arrays = read_npz(references().join("packed.npz")).unwrap();
    assert_eq!(arrays.len(), 28);
    for (code, dtype) in [
        ("i1", DType::I32),
        ("i2", DType::I32),
        ("i4", DType::I32),
        ("i8", DType::I64),
        ("u1", DType::U8),
        ("u2", DType::I32),
        ("u4", DType::U32),
        ("u8", DType::I64),
        ("f2", DType::F16),
        ("f4", DType::F32),
        ("f8", DType::F64),
    ] {
        for order in ["le", "be"] {
            let array = &arrays[&format!("{code}{order}")];
            assert_eq!((array.dtype(), array.dims()), (dtype, &[3][..]), "{code}{order}");
            let values: Vec<f64> = match dtype {
                DType::I32 => array.to_vec::<i32>().unwrap().into_iter().map(f64::from).collect(),
                DType::I64 => array.to_vec::<i64>().unwrap().into_iter().map(|x| x as f64).collect(),
                DType::U8 => array.to_vec::<u8>().unwrap().into_iter().map(f64::from).collect(),
                DType::U32 => array.to_vec::<u32>().unwrap().into_iter().map(f64::from).collect(),
                DType::F16 => array.bytes().as_chunks::<2>().0.iter().map(|&b| half(u16::from_ne_bytes(b))).collect(),
                DType::F32 => array.to_vec::<f32>().unwrap().into_iter().map(f64::from).collect(),
                _ => array.to_vec::<f64>().unwrap(),
            };
            assert_eq!(values, [0.0, 1.0, 100.0], "{code}{order}");
        }
    }
    assert_eq!(arrays["bool"].to_vec::<bool>().unwrap(), [true, false, true]);
    assert_eq!(arrays["negative"].to_vec::<i32>().unwrap(), [-1, -100]);
    assert_eq!(arrays["single"], Array::new([], vec![2.5f64]).unwrap());
    assert_eq!(arrays["empty"].dims(), [0, 3]);
    let due = Array::new([2, 3, 4], (0..24).map(|i| i as f32).collect()).unwrap();
    let plain = read_npz(references().join("plain.npz")).unwrap();
    for array in [&arrays["c"], &arrays["fortran"], &plain["c"], &plain["fortran"]] {
        assert_eq!((array, array.to_vec::<f32>().unwrap()), (&due, due.to_vec::<f32>().unwrap()));
    }
}

/// The value of a half that is 0 or normal.
fn half(bits: u16) -> f64 {
    let exponent = i32::from(bits >> 10) - 15;
    if bits == 0 { 0.0 } else { (1.0 + f64::from(bits & 0x3ff) / 1024.0) * f64::from(exponent).exp2() }
}

#[test]
fn rows_are_read_from_the_file() {
    let folder = Folder::new("npy");
    let values: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_be_bytes()).collect();
    let path = folder.file("a.npy", npy(&header("'>f4'", "False", "(3, 2)"), &values));
    let rows = NpyRows::open(&path).unwrap();
    assert_eq!((rows.len(), rows.get(2).unwrap().to_vec::<f32>().unwrap()), (3, vec![4.0, 5.0]));
    assert!(rows.get(3).unwrap_err().to_string().contains("index is 3"));
    let whole = read_npy(&path).unwrap();
    let batches = Loader::new(rows).batch(2).workers(3).stack().epoch(0).unwrap();
    let read: Vec<f32> = batches.flat_map(|batch| batch.unwrap().data.to_vec::<f32>().unwrap()).collect();
    assert_eq!(read, whole.to_vec::<f32>().unwrap());
    // Version 3: four bytes of length. One axis has no order.
    let text = header("'|u1'", "True", "(2,)");
    let bytes = [b"\x93NUMPY\x03\x00", &(text.len() as u32).to_le_bytes()[..], text.as_bytes(), &[7, 8]].concat();
    let rows = NpyRows::open(folder.file("long.npy", bytes)).unwrap();
    assert_eq!(rows.get(1).unwrap(), Array::new([], vec![8u8]).unwrap());
    assert_eq!(NpyRows::open(folder.file("none.npy", npy(&header("'<f4'", "False", "(0, 3)"), &[]))).unwrap().len(), 0);
    for (shape, fortran) in [("()", "False"), ("(1, 1)", "True")] {
        let path = folder.file("b.npy", npy(&header("'<f4'", fortran, shape), &[0; 4]));
        assert!(NpyRows::open(&path).unwrap_err().to_string().contains("b.npy: a single value, or in Fortran's order"));
        assert_eq!(read_npy(&path).unwrap().to_vec::<f32>().unwrap(), [0.0]);
    }
}

#[test]
fn files_that_are_refused() {
    let folder = Folder::new("npy-refused");
    let of = |kind: &str, shape: &str, bytes: &[u8]| npy(&header(kind, "False", shape), bytes);
    let largest = u64::MAX.to_le_bytes();
    for (bytes, due) in [
        (of("'<f4'", "(2,)", &[0; 7]), "it has not the bytes of a shape [2] of elements f4"),
        (of("'<f4'", "(2,)", &[0; 9]), "it has not the bytes"),
        (of("'<f8'", "(4294967296, 4294967296)", &[0; 8]), "it has not the bytes"),
        (of("'<f8'", "(1152921504606846976,)", &[0; 8]), "it has not the bytes"),
        (of("'|b1'", "(1,)", &[2]), "0 or 1 as a bool"),
        (of("'<u8'", "(1,)", &largest), "above the largest `i64`"),
        (of("'<c8'", "(1,)", &[0; 8]), "elements `c8` are no numbers"),
        (of("'|O'", "(1,)", &[0; 8]), "elements and shape are not read from"),
        (of("'<U0'", "(1,)", &[]), "elements and shape are not read from"),
        (of("[('a', '<f4')]", "(1,)", &[0; 4]), "elements and shape are not read from"),
        (of("'<f4'", "(-1,)", &[0; 4]), "elements and shape are not read from"),
        (b"\x93NUMPY\x01\x00\xff\x00{".to_vec(), "its header should have 255 bytes, and 1 can be read"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{".to_vec(), "should have 4294967295 bytes"),
        (b"PK\x03\x04 is no array".to_vec(), "it does not begin as .npy files do"),
        (b"\x93NUM".to_vec(), "it is no .npy file"),
    ] {
        let path = folder.file("bad.npy", bytes);
        let error = read_npy(&path).unwrap_err().to_string();
        assert!(error.contains("bad.npy") && error.contains(due), "{error} should say {due}");
    }
    let rows = NpyRows::open(folder.file("rows.npy", of("'<u8'", "(2,)", &[[0; 8], largest].concat()))).unwrap();
    assert!(rows.get(0).is_ok() && rows.get(1).unwrap_err().to_string().contains("rows.npy: row 1: a `uint64`"));
    assert!(
        NpyRows::open(folder.file("cut.npy", of("'<f4'", "(2,)", &[0; 7])))
            .unwrap_err()
            .to_string()
            .contains("cut.npy")
    );
    let whole = fs::read(references().join("packed.npz")).unwrap();
    assert!(
        read_npz(folder.file("cut.npz", &whole[..whole.len() / 2])).unwrap_err().to_string().contains("no ZIP archive")
    );
    let mut damaged = whole;
    damaged[70..90].fill(0xff);
    let error = read_npz(folder.file("damaged.npz", damaged)).unwrap_err().to_string();
    assert!(error.contains("damaged.npz: `i1le.npy`"), "{error}");
}

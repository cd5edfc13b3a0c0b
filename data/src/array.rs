//! [`Array`]: values in host memory, before they become a tensor.

use std::{fmt, ops::Range, sync::Arc};

use numcore::{DType, Element, Error, Result, Runtime, Shape, Tensor, Within};

/// Values of one element type and one shape in host memory, row-major. Clones and [rows](Array::row) share the memory.
///
/// ```
/// use data::Array;
/// # fn main() -> numcore::Result<()> {
/// let images = Array::new([2, 3], vec![0u8, 1, 2, 3, 4, 5])?;
/// assert_eq!(images.row(1)?.to_vec::<u8>()?, [3, 4, 5]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Array {
    values: Arc<dyn Values>,
    /// The byte range of this array within `values`.
    range: Range<usize>,
    shape: Shape,
    dtype: DType,
}

/// Owned host memory, read as bytes.
trait Values: Send + Sync {
    fn bytes(&self) -> &[u8];
}

impl<E: Element> Values for Vec<E> {
    fn bytes(&self) -> &[u8] {
        E::bytes(self)
    }
}

impl Array {
    /// Makes an array of a shape from values in row-major order, without a copy.
    ///
    /// # Errors
    /// Fails if the number of values is not the number of elements of the shape.
    #[track_caller]
    pub fn new<E: Element>(shape: impl AsRef<[usize]>, values: Vec<E>) -> Result<Self> {
        let shape = Shape::new(shape.as_ref()).at_caller()?;
        if shape.numel() != values.len() {
            let why = format!("{} elements, but {} values were given", shape.numel(), values.len());
            return Err(Error::shape("Array", &[shape], why)).at_caller();
        }
        let range = 0..E::bytes(&values).len();
        Ok(Array { values: Arc::new(values), range, shape, dtype: E::DTYPE })
    }

    /// Makes an array with one axis, without a copy.
    pub fn from_vec<E: Element>(values: Vec<E>) -> Self {
        let (range, shape) = (0..E::bytes(&values).len(), Shape::from([values.len()]));
        Array { values: Arc::new(values), range, shape, dtype: E::DTYPE }
    }

    /// Makes an array from stored bytes, row-major, in the host's byte order, without a copy.
    ///
    /// # Errors
    /// Fails if the number of bytes is not elements times element size, or if a `bool` array has a byte above 1.
    #[track_caller]
    pub fn from_bytes(shape: impl AsRef<[usize]>, dtype: DType, bytes: Vec<u8>) -> Result<Self> {
        let shape = Shape::new(shape.as_ref()).at_caller()?;
        if shape.numel().checked_mul(dtype.size()) != Some(bytes.len()) {
            let why = format!("elements of {dtype} do not take {} bytes", bytes.len());
            return Err(Error::shape("Array::from_bytes", &[shape], why)).at_caller();
        }
        if let Some(at) = bytes.iter().position(|&byte| dtype == DType::Bool && byte > 1) {
            let allowed = format!("0 or 1 as a bool; it is byte {at}");
            return Err(Error::range("Array::from_bytes", "byte", u32::from(bytes[at]), allowed)).at_caller();
        }
        Ok(Array { range: 0..bytes.len(), values: Arc::new(bytes), shape, dtype })
    }

    /// Copies the values of a tensor to host memory.
    #[track_caller]
    pub fn from_tensor<R: Runtime>(tensor: &Tensor<R>) -> Result<Self> {
        Array::from_bytes(tensor.dims(), tensor.dtype(), tensor.to_bytes().at_caller()?)
    }

    /// The sizes of the dimensions.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The sizes of the dimensions, as a slice.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The stored bytes, row-major, in the host's byte order.
    pub fn bytes(&self) -> &[u8] {
        &self.values.bytes()[self.range.clone()]
    }

    /// The values in row-major order. `E` must be the element type, or it is an error: nothing is converted silently.
    #[track_caller]
    pub fn to_vec<E: Element>(&self) -> Result<Vec<E>> {
        if self.dtype != E::DTYPE {
            let why = format!("values of {} were asked for", E::DTYPE);
            return Err(Error::dtype("Array::to_vec", &[self.dtype], why)).at_caller();
        }
        let mut values = vec![E::default(); self.shape.numel()];
        E::fill(&mut values, self.bytes());
        Ok(values)
    }

    /// Row `index` of the first axis; it shares the memory.
    ///
    /// # Errors
    /// Fails if there is no such row, or the array has no axis.
    #[track_caller]
    pub fn row(&self, index: usize) -> Result<Array> {
        match self.dims().split_first() {
            Some((&rows, rest)) if index < rows => {
                let size = self.range.len() / rows;
                let start = self.range.start + index * size;
                let shape = Shape::new(rest).at_caller()?;
                Ok(Array { values: self.values.clone(), range: start..start + size, shape, dtype: self.dtype })
            }
            _ => Err(Error::shape("Array::row", &[self.shape], format!("there is no row {index}"))).at_caller(),
        }
    }

    /// The array with another shape: the values keep their row-major order.
    ///
    /// # Errors
    /// Fails if the new shape has another number of elements.
    #[track_caller]
    pub fn reshape(mut self, shape: impl AsRef<[usize]>) -> Result<Array> {
        let shape = Shape::new(shape.as_ref()).at_caller()?;
        if shape.numel() != self.shape.numel() {
            return Err(Error::shape(
                "Array::reshape",
                &[self.shape, shape],
                "they have different numbers of elements",
            ))
            .at_caller();
        }
        self.shape = shape;
        Ok(self)
    }

    /// Applies `f` to every value. `E` must be the element type, or it is an error.
    #[track_caller]
    pub fn map<E: Element, T: Element>(&self, f: impl FnMut(E) -> T) -> Result<Array> {
        Array::new(self.dims(), self.to_vec::<E>()?.into_iter().map(f).collect())
    }

    /// Stacks arrays of one shape and element type along a new first axis.
    ///
    /// # Errors
    /// Fails if there is no array, or two differ in shape or element type.
    #[track_caller]
    pub fn stack(rows: &[Array]) -> Result<Array> {
        let Some(first) = rows.first() else {
            return Err(Error::range("Array::stack", "number of rows", 0usize, "at least 1, whose shape they have"))
                .at_caller();
        };
        if let Some((i, other)) = rows.iter().enumerate().find(|(_, r)| r.shape != first.shape) {
            let why = format!("row 0 and row {i} differ; pad them, or batch them as a list");
            return Err(Error::shape("Array::stack", &[first.shape, other.shape], why)).at_caller();
        }
        if let Some((i, other)) = rows.iter().enumerate().find(|(_, r)| r.dtype != first.dtype) {
            let why = format!("row 0 and row {i} differ");
            return Err(Error::dtype("Array::stack", &[first.dtype, other.dtype], why)).at_caller();
        }
        let mut bytes = Vec::with_capacity(rows.len() * first.range.len());
        rows.iter().for_each(|row| bytes.extend_from_slice(row.bytes()));
        let shape = first.shape.insert(0, rows.len()).at_caller()?;
        Ok(Array { range: 0..bytes.len(), values: Arc::new(bytes), shape, dtype: first.dtype })
    }

    /// Copies the values to a tensor on `rt`, with this shape and element type.
    #[track_caller]
    pub fn to_tensor<R: Runtime>(&self, rt: &R) -> Result<Tensor<R>> {
        Tensor::from_bytes(rt, self.shape, self.dtype, self.bytes())
    }
}

/// Equality of element types, shapes and bits.
impl PartialEq for Array {
    fn eq(&self, other: &Self) -> bool {
        self.dtype == other.dtype && self.shape == other.shape && self.bytes() == other.bytes()
    }
}

impl Eq for Array {}

impl fmt::Debug for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Array({} {})", self.dtype, self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_share_and_stack_again() {
        let all = Array::new([3, 2], vec![1i64, 2, 3, 4, 5, 6]).unwrap();
        let rows: Vec<Array> = (0..3).map(|i| all.row(i).unwrap()).collect();
        assert_eq!(rows[2].to_vec::<i64>().unwrap(), [5, 6]);
        assert_eq!(rows[1].row(1).unwrap().to_vec::<i64>().unwrap(), [4]);
        assert_eq!(Array::stack(&rows).unwrap(), all);
        assert!(all.row(3).is_err() && rows[1].row(1).unwrap().row(0).is_err());
        let none = Array::new([0, 2], Vec::<f32>::new()).unwrap();
        assert!(none.row(0).is_err());
        assert_eq!(Array::new([2, 0], Vec::<f32>::new()).unwrap().row(1).unwrap().dims(), [0]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let says = |result: Result<Array>| result.unwrap_err().to_string();
        assert!(says(Array::new([2, 2], vec![1f32; 3])).contains("4 elements, but 3 values"));
        assert!(says(Array::from_bytes([2], DType::F32, vec![0; 7])).contains("do not take 7 bytes"));
        assert!(
            says(Array::from_bytes([2], DType::Bool, vec![1, 2]))
                .contains("byte is 2, and must be 0 or 1 as a bool; it is byte 1")
        );
        let [a, b] = [2, 3].map(|n| Array::from_vec(vec![0f32; n]));
        assert!(says(Array::stack(&[a.clone(), b])).contains("row 0 and row 1 differ; pad them"));
        assert!(says(Array::stack(&[a.clone(), Array::from_vec(vec![0i64; 2])])).contains("f32, i64"));
        assert!(says(Array::stack(&[])).contains("number of rows is 0"));
        assert!(says(a.clone().reshape([3])).contains("different numbers"));
        assert!(a.to_vec::<f64>().unwrap_err().to_string().contains("f64 were asked for"));
    }

    #[test]
    fn values_are_mapped() {
        let scaled = Array::from_vec(vec![0u8, 255]).map(|x: u8| f32::from(x) / 255.0).unwrap();
        assert_eq!(scaled.to_vec::<f32>().unwrap(), [0.0, 1.0]);
    }
}

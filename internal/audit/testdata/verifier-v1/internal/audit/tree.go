package audit

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"math/bits"

	"bivy/internal/kind"
)

// Tree is the Merkle hash tree of RFC 6962, section 2.1
// (https://www.rfc-editor.org/rfc/rfc6962#section-2.1), kept so that leaves are
// appended in O(log n) time and space. It stores only the roots of its complete
// subtrees, largest first: one for each bit that is set in the number of
// leaves. (RFC 9162, section 2.1.2, computes the root of a tree from the same
// subtrees.) The zero value is the empty tree.
//
//	7 leaves:   root = H(a, H(b, c))      a: leaves 1-4, b: 5-6, c: 7
type Tree struct {
	size     uint64
	subtrees [][sha256.Size]byte
}

// Size returns the number of leaves.
func (t Tree) Size() uint64 { return t.size }

// Append adds a leaf at the end.
func (t *Tree) Append(leaf []byte) {
	hash := leafHash(leaf)
	n := len(t.subtrees)
	// Two complete subtrees of one size become one of twice that size: as often
	// as the number of leaves before ends in set bits.
	for range bits.TrailingZeros64(^t.size) {
		hash = nodeHash(t.subtrees[n-1], hash)
		n--
	}
	t.subtrees = append(t.subtrees[:n:n], hash)
	t.size++
}

// Root returns the hex root of the tree: the Merkle Tree Hash of RFC 6962.
func (t Tree) Root() string {
	if t.size == 0 {
		empty := sha256.Sum256(nil)
		return hex.EncodeToString(empty[:])
	}
	last := len(t.subtrees) - 1
	hash := t.subtrees[last]
	for i := last - 1; i >= 0; i-- {
		hash = nodeHash(t.subtrees[i], hash)
	}
	return hex.EncodeToString(hash[:])
}

// Encode returns the tree as bytes for ParseTree: the number of leaves in 8
// bytes, most significant first, and the hashes of the subtrees.
func (t Tree) Encode() []byte {
	out := binary.BigEndian.AppendUint64(nil, t.size)
	for _, s := range t.subtrees {
		out = append(out, s[:]...)
	}
	return out
}

// ParseTree reads what Encode wrote.
func ParseTree(data []byte) (Tree, error) {
	if len(data) < 8 {
		return Tree{}, kind.Errorf(kind.Internal, "a stored tree has %d bytes, want at least 8", len(data))
	}
	t := Tree{size: binary.BigEndian.Uint64(data)}
	data = data[8:]
	if want := bits.OnesCount64(t.size) * sha256.Size; len(data) != want {
		return Tree{}, kind.Errorf(kind.Internal, "a stored tree of %d leaves has %d bytes of hashes, want %d", t.size, len(data), want)
	}
	for ; len(data) > 0; data = data[sha256.Size:] {
		t.subtrees = append(t.subtrees, [sha256.Size]byte(data))
	}
	return t, nil
}

// leafHash and nodeHash differ by a prefix, so that a node can never be passed
// off as a leaf (RFC 6962, section 2.1).
func leafHash(leaf []byte) [sha256.Size]byte {
	return sha256.Sum256(append([]byte{0}, leaf...))
}

func nodeHash(left, right [sha256.Size]byte) [sha256.Size]byte {
	b := make([]byte, 0, 1+2*sha256.Size)
	b = append(b, 1)
	b = append(b, left[:]...)
	b = append(b, right[:]...)
	return sha256.Sum256(b)
}

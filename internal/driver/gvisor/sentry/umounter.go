package sentry

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/specutils"
)

// useUmounter makes gVisor unmount /proc with a program of 200 bytes instead
// of a second bivy-sentry, whose start alone costs 30 ms of CPU.
//
// gVisor executes specutils.ExePath for nothing else in this process: the
// capabilities are applied to all threads in place, not by executing anew
// (willReexec in its boot command). Where the program cannot be used, gVisor's
// own way remains.
func useUmounter() error {
	if runtime.GOARCH != "amd64" {
		return nil
	}
	fd, err := unix.MemfdCreate("bivy-umount", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3 every memfd was executable
		fd, err = unix.MemfdCreate("bivy-umount", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil // vm.memfd_noexec forbids it
	}
	program := umounter()
	n, err := unix.Write(fd, program)
	if err != nil {
		return fmt.Errorf("umount program: %w", err)
	}
	if n != len(program) {
		return fmt.Errorf("umount program: wrote %d of %d bytes", n, len(program))
	}
	const seals = unix.F_SEAL_WRITE | unix.F_SEAL_GROW | unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return fmt.Errorf("umount program: %w", err)
	}
	// Resolved in the child, which has the same descriptor until it executes.
	specutils.ExePath = fmt.Sprintf("/proc/self/fd/%d", fd)
	return nil
}

// umounter is a static x86-64 ELF program that does what runsc's "umount
// --sync-fd=3 /proc" does, whatever its arguments: wait for one byte on
// descriptor 3, detach /proc, exit with 0 only if both went well.
func umounter() []byte {
	code := []byte{
		0x48, 0x83, 0xec, 0x10, // sub  rsp, 16
		0x31, 0xc0, // xor  eax, eax        read
		0xbf, 3, 0, 0, 0, // mov  edi, 3
		0x48, 0x89, 0xe6, // mov  rsi, rsp
		0xba, 1, 0, 0, 0, // mov  edx, 1
		0x0f, 0x05, // syscall
		0xbf, 1, 0, 0, 0, // mov  edi, 1          exit status
		0x83, 0xf8, 1, // cmp  eax, 1
		0x75, 27, // jne  exit
		0xb8, 166, 0, 0, 0, // mov  eax, 166        umount2
		0x48, 0x8d, 0x3d, 22, 0, 0, 0, // lea  rdi, [rip+22]    "/proc"
		0xbe, 2, 0, 0, 0, // mov  esi, MNT_DETACH
		0x0f, 0x05, // syscall
		0x31, 0xff, // xor  edi, edi
		0x85, 0xc0, // test eax, eax
		0x40, 0x0f, 0x95, 0xc7, // setne dil
		// exit:
		0xb8, 231, 0, 0, 0, // mov  eax, 231        exit_group
		0x0f, 0x05, // syscall
		'/', 'p', 'r', 'o', 'c', 0,
	}
	const base, headers = 0x400000, 64 + 56
	var b bytes.Buffer
	put := func(values ...any) {
		for _, v := range values {
			_ = binary.Write(&b, binary.LittleEndian, v) // a buffer takes everything
		}
	}
	// ELF header (System V gABI, figure 4-3): 64-bit, little-endian, executable.
	put([16]byte{0x7f, 'E', 'L', 'F', 2, 1, 1}, uint16(2), uint16(62), uint32(1),
		uint64(base+headers), uint64(64), uint64(0), uint32(0), uint16(64), uint16(56), uint16(1), uint16(0), uint16(0), uint16(0))
	// One program header: load the whole file, readable and executable.
	size := uint64(headers + len(code))
	put(uint32(1), uint32(5), uint64(0), uint64(base), uint64(base), size, size, uint64(4096))
	b.Write(code)
	return b.Bytes()
}

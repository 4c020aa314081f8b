package sentry

import (
	"fmt"
	"reflect"
	"sync/atomic"
	"unsafe"

	"gvisor.dev/gvisor/pkg/sentry/arch"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
	gsync "gvisor.dev/gvisor/pkg/sync"
)

// running is the guest kernel of this process once its first task has made a
// system call.
var running atomic.Pointer[kernel.Kernel]

// noteKernel arranges that running is set. gVisor keeps its kernel in
// variables that no other package can reach, and a restore replaces it; a
// task has it, though, and system call tables have a filter that is called
// with the task. The filter is switched off by its first call, answers that
// nothing is to be done, and is not saved in snapshots.
func noteKernel() {
	for _, table := range kernel.SyscallTables() {
		table.ExternalFilterBefore = func(t *kernel.Task, _ uintptr, _ arch.SyscallArguments) bool {
			if running.CompareAndSwap(nil, t.Kernel()) {
				for _, table := range kernel.SyscallTables() {
					table.FeatureEnable.Enable(kernel.ExternalBeforeEnable, nil, false)
				}
			}
			return false
		}
		table.FeatureEnable.EnableAll(kernel.ExternalBeforeEnable)
	}
}

// field returns the address of a field of a struct of gVisor's that is not
// exported. It fails when the struct has no such field or the field is of
// another type, as it may be after an upgrade: every test of the driver that
// exports changes finds that out.
func field[T any](structure reflect.Value, name string) (*T, error) {
	for structure.Kind() == reflect.Pointer || structure.Kind() == reflect.Interface {
		if structure.IsNil() {
			return nil, fmt.Errorf("gVisor: no struct to read %s of", name)
		}
		structure = structure.Elem()
	}
	if structure.Kind() != reflect.Struct || !structure.CanAddr() {
		return nil, fmt.Errorf("gVisor: %s has no field %s", structure.Kind(), name)
	}
	f := structure.FieldByName(name)
	if !f.IsValid() {
		return nil, fmt.Errorf("gVisor: %s has no field %s", structure.Type(), name)
	}
	if f.Type() != reflect.TypeFor[T]() {
		return nil, fmt.Errorf("gVisor: field %s of %s is a %s", name, structure.Type(), f.Type())
	}
	return (*T)(unsafe.Pointer(f.UnsafeAddr())), nil
}

// inner returns a field whose type has no name outside gVisor.
func inner(structure reflect.Value, name string) (reflect.Value, error) {
	for structure.Kind() == reflect.Pointer || structure.Kind() == reflect.Interface {
		structure = structure.Elem()
	}
	if structure.Kind() != reflect.Struct {
		return reflect.Value{}, fmt.Errorf("gVisor: no struct to read %s of", name)
	}
	f := structure.FieldByName(name)
	if !f.IsValid() {
		return reflect.Value{}, fmt.Errorf("gVisor: %s has no field %s", structure.Type(), name)
	}
	return f, nil
}

// filesystems returns every file system of the kernel, with a reference held
// on each: also those that are mounted nowhere any more and live on because a
// task has a file of theirs open.
func filesystems(v *vfs.VirtualFilesystem) ([]*vfs.Filesystem, error) {
	mu, err := field[gsync.Mutex](reflect.ValueOf(v), "filesystemsMu")
	if err != nil {
		return nil, err
	}
	all, err := field[map[*vfs.Filesystem]struct{}](reflect.ValueOf(v), "filesystems")
	if err != nil {
		return nil, err
	}
	mu.Lock()
	defer mu.Unlock()
	found := make([]*vfs.Filesystem, 0, len(*all))
	for fs := range *all {
		if fs.TryIncRef() { // false: its last reference is being dropped
			found = append(found, fs)
		}
	}
	return found, nil
}
